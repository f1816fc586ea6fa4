"""What the tools that run a model have in common: its options, its ranks, the model and its
tokenizer."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from megazoo.cli.adapters import open_with_base
from megazoo.cli.classifier import with_pad_token
from megazoo.cli.flags import File, Name, Source
from megazoo.cli.launch.starting import data_parallel_size, start_missing_ranks
from megazoo.cli.options import AS_STORED, ImportOption, VerifyOption
from megazoo.cli.parsing import required
from megazoo.cli.rules import parse_stage_layers
from megazoo.cli.tokenizer import find_tokenizer
from megazoo.environment import world_size
from megazoo.errors import UserError
from megazoo.layers import round_to_int8
from megazoo.lora import load_from, merge
from megazoo.lora.source import open_beside
from megazoo.models.base import Model
from megazoo.models.pretrained import load_weights
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.device import choose_device, set_fp32_precision
from megazoo.terminal import note_rank_0, print_error
from megazoo.tokenizer import Tokenizer, open_tokenizer
from megazoo.tokenizer.settings import chat_template_in


@dataclass
class InferenceOptions(ImportOption, VerifyOption):
    """What the tools that run a model take."""

    source: Source = None
    """Checkpoint of any layout (a step's directory, or the one above for the latest), Hugging Face
    directory, or org/name[@revision] on the Hugging Face hub. With a checkpoint of adapters comes
    the base that it names."""
    adapter: File = None
    """Directory of a LoRA adapter to run the model with, PEFT's or megazoo.lora.save's, or the
    checkpoint of a run with adapters."""
    tp: int = 1
    """Tensor-parallel size: ranks that share each layer."""
    pp: int = 1
    """Pipeline-parallel size: stages that the layers are cut into."""
    cp: int = 1
    """Context-parallel size. Here these ranks hold whole sequences, and count as replicas."""
    stage_layers: str = "balanced"
    """Where the pipeline is cut: balanced, by cost; uniform, by layers; or the layers of each
    stage: 5,6,6,5."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, AS_STORED] = None
    """Type of weights and activations."""
    int8: bool = False
    """Round the weights of the layers' matrices to 8 bits: a quarter of fp32's memory for them, and
    on CPUs faster answers where a rank's matrices have multiples of 16 rows and columns."""
    fp32_precision: Literal["tf32", "ieee"] = "tf32"
    """How CUDA multiplies matrices of float32. tf32: on tensor cores, several times as fast, of
    numbers rounded to 10 bits of mantissa; ieee: as they are, like CPUs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run. auto: cuda if each rank of the machine can have a device, else cpu."""
    tokenizer: Name = None
    """byte, the directory or file of a tokenizer, or org/name on the Hugging Face hub; by default
    what is beside the model, or what it was trained on."""

    @property
    def one_rank(self) -> bool:
        """Whether this process runs the model alone: then nobody else reads what it reads."""
        return world_size() == self.tp * self.pp * self.cp == 1


def load_for_inference(
    options: InferenceOptions, *, keep_on_interrupt: bool = False
) -> tuple[Model, Tokenizer]:
    """Start the missing ranks, and return this rank's part of the model and its tokenizer.

    keep_on_interrupt: see `start_missing_ranks`.
    """
    (path,) = required(options, "source")
    source, options.adapter, note = open_with_base(path, options.adapter, options.verify)
    where = options.tokenizer or source.tokenizer
    if where is None:
        raise UserError(
            f"{source.path} has no tokenizer: give --tokenizer byte, or a directory or file"
        )
    tokenizer = open_tokenizer(find_tokenizer(where))
    config, adapters = source.config, None
    if options.adapter:
        adapters, config = open_beside(options.adapter, source, verify=options.verify)
    trained = chat_template_in(adapters.path) if adapters else None
    tokenizer.chat_template = (
        trained or tokenizer.chat_template or chat_template_in(source.path)  # byte has no files
    )
    if config.num_labels:
        config = with_pad_token(config, source, tokenizer)
    source.model.check(config, options.tp, options.pp)
    stage_layers = parse_stage_layers(options.stage_layers)
    layout = ParallelContext.virtual(options.tp, options.pp, stage_layers=stage_layers)
    source.model.all_stages(config, layout)  # refuses a pipeline that can't be cut so
    data_parallel_size(options.tp, options.pp, options.cp)
    local_ranks = options.tp * options.pp * options.cp if world_size() == 1 else None
    choose_device(options.device, local_ranks)
    start_missing_ranks(
        options.tp,
        options.pp,
        options.cp,
        report=print_error,
        keep_on_interrupt=keep_on_interrupt,
    )
    if note:
        note_rank_0(note)
    # The ranks of --cp are replicas here: generation and scoring need whole sequences.
    ctx = ParallelContext.from_torch(
        options.tp, options.pp, stage_layers=stage_layers, device=options.device
    )
    set_fp32_precision(options.fp32_precision)
    dtype = (
        getattr(torch, options.dtype)
        if options.dtype
        else source.dtype_of(next(iter(source.specs)))
    )
    model = source.model.empty(config, ctx, dtype=dtype)
    load_weights(source, model)
    if adapters:
        load_from(model, adapters)
    if options.int8:
        if adapters:
            merge(model)
        round_to_int8(model)
    return model.eval(), tokenizer
