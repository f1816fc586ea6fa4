"""Shared code of the tools that run a model: options, ranks, model and tokenizer."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from megazoo.cli.options import ImportOption
from megazoo.cli.parsing import required
from megazoo.cli.starting import data_parallel_size, start_missing_ranks
from megazoo.commands import torchrun_line
from megazoo.environment import world_size
from megazoo.errors import UserError
from megazoo.layers import pack_weights, round_to_float8, round_to_int8
from megazoo.lora import load_from, merge
from megazoo.lora.source import open_beside
from megazoo.models.base import Model
from megazoo.models.pretrained import load_weights
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.device import choose_device, set_fp32_precision
from megazoo.parallel.layout import Layout
from megazoo.settings import File, Name, Source, check_value, described
from megazoo.terminal import note_rank_0, print_error
from megazoo.tokenizer import Tokenizer, open_tokenizer
from megazoo.tokenizer.templates import chat_templates_in
from megazoo.trainer.adapters import open_with_base
from megazoo.trainer.classifier import with_pad_token
from megazoo.trainer.options import AS_STORED, ParallelOptions, VerifyOption
from megazoo.trainer.rules import check_expert_parallel
from megazoo.trainer.tokenizer import find_tokenizer


@dataclass
class InferenceOptions(ImportOption, VerifyOption):
    """Options of the tools that run a model."""

    source: Source = None
    """Checkpoint saved in any parallel layout (the directory of a step, or its parent for the
    latest step), Hugging Face directory, or org/name[@revision] on the Hugging Face hub. For a
    checkpoint of adapters, the base that it names is loaded too."""
    adapter: File = None
    """LoRA adapter to add to the model: a directory of PEFT or megazoo.lora.save, or the checkpoint
    of a LoRA run."""
    tp: int = 1
    """Tensor-parallel size: number of ranks that each layer is sharded over."""
    pp: int = 1
    """Pipeline-parallel size: number of stages that the layers are partitioned into."""
    cp: int = 1
    """Context-parallel size. In this command, these ranks hold full sequences and act as replicas.
    """
    ep: int = 1
    """Expert-parallel size: number of replicas that the experts of each layer are sharded over. If
    the command starts its ranks itself, it starts as many replicas as --ep needs."""
    stage_layers: str = "balanced"
    """How layers are assigned to pipeline stages. balanced: by estimated cost. uniform: by number
    of layers. Or the number of layers of each stage, such as 5,6,6,5."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, AS_STORED] = None
    """Data type of weights and activations."""
    int8: bool = False
    """Quantize the matrices of the layers to 8 bits. They need a quarter of the memory of fp32. On
    CPUs generation is faster if the dimensions of each rank's matrices are multiples of 16."""
    float8: bool = False
    """Quantize the matrices of the layers to float8, as --int8 does to integers. On GPUs with
    float8, the products are computed in float8."""
    fp32_precision: Literal["tf32", "ieee"] = "tf32"
    """Precision of float32 matrix products on CUDA. tf32: tensor cores, 10-bit mantissa, several
    times faster. ieee: full float32, as on CPUs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on. auto: cuda if every local rank can have its own GPU, otherwise cpu."""
    tokenizer: Name = None
    """Tokenizer: byte, a directory or file, or org/name on the Hugging Face hub. By default the
    tokenizer stored with the model, or the one it was trained with."""

    @property
    def one_rank(self) -> bool:
        """Whether the model runs in this process only, so that its input may be a pipe."""
        return world_size() == self.tp * self.pp * self.cp * self.ep == 1


def run_with_model(
    options: InferenceOptions,
    work: Callable[[Model, Tokenizer], None],
    *,
    keep_on_interrupt: bool = False,
) -> None:
    """Start the missing ranks, and call work(model, tokenizer) on each, with its shard of the
    model.

    keep_on_interrupt: see `start_missing_ranks`.
    """
    (path,) = required(options, "source")
    if options.int8 and options.float8:
        raise UserError("--int8 and --float8 both quantize the matrices: use only one")
    source, options.adapter, note = open_with_base(path, options.adapter, options.verify)
    where = options.tokenizer or source.tokenizer
    if where is None:
        raise UserError(
            f"{source.path} has no tokenizer: use --tokenizer byte, or a directory or file"
        )
    tokenizer = open_tokenizer(find_tokenizer(where))
    config, adapters = source.config, None
    if options.adapter:
        adapters, config = open_beside(options.adapter, source, verify=options.verify)
    trained = chat_templates_in(adapters.path) if adapters else {}
    if trained or not tokenizer.chat_templates:  # byte has no files
        tokenizer.chat_templates = trained or chat_templates_in(source.path)
    if config.num_labels:
        config = with_pad_token(config, source, tokenizer)
    source.model.check(config, options.tp, options.pp)
    dp = _data_parallel_size(options)
    check_expert_parallel(config, options.ep, dp, options.cp)
    # The ranks of --cp are replicas here: generation and scoring need full sequences.
    replicas = dp * options.cp
    layout = Layout(
        tp=options.tp,
        pp=options.pp,
        dp=replicas,
        ep=options.ep,
        stage_layers=options.stage_layers,
    )
    # raises if the layers cannot be partitioned so
    source.model.all_stages(config, ParallelContext(layout))
    local_ranks = options.tp * options.pp * replicas if world_size() == 1 else None
    choose_device(options.device, local_ranks)

    def run_rank() -> None:
        if note:
            note_rank_0(note)
        ctx = ParallelContext.of_layout(layout, options.device)
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
        if options.int8 or options.float8:
            if adapters:
                merge(model)
            (round_to_int8 if options.int8 else round_to_float8)(model)
        pack_weights(model)
        work(model.eval(), tokenizer)

    start_missing_ranks(
        run_rank,
        options.tp,
        options.pp,
        options.cp,
        dp,
        report=print_error,
        keep_on_interrupt=keep_on_interrupt,
    )


def _data_parallel_size(options: InferenceOptions) -> int:
    """Return the data-parallel size: that of the launcher's ranks, or the smallest one for --ep.

    Raises:
        UserError: A size is invalid, or the number of ranks does not fit.
    """
    dp = data_parallel_size(options.tp, options.pp, options.cp)
    check_value(described(ParallelOptions)["ep"], "ep", options.ep)
    least = math.lcm(options.ep, options.cp) // options.cp
    if world_size() == 1:
        return least
    if dp % least:
        ranks = options.tp * options.pp * options.cp * least * math.ceil(dp / least)
        raise UserError(
            f"--ep {options.ep} must divide the number of replicas, and the launcher started "
            f"{dp * options.cp}: use {torchrun_line(ranks)}"
        )
    return dp
