"""Convert a model from any format to shards for tensor and pipeline parallelism, to a Hugging Face
directory, to a checkpoint of torch.distributed.checkpoint (DCP), to the files of PEFT, or to a GGUF
file, one tensor at a time.

$ megazoo convert path/to/llama shards --tp 2 --pp 4 --dtype bfloat16
$ megazoo convert EleutherAI/pythia-160m shards
$ megazoo convert runs/a resharded --tp 4
$ megazoo convert runs/a merged --to hf
$ megazoo convert runs/lora adapter --to peft
$ megazoo convert path/to/llama merged --to hf --adapter adapter
$ megazoo convert model.gguf path/to/llama --to hf
$ megazoo convert path/to/llama model.gguf --to gguf --quantize q8_0
$ megazoo convert path/to/megatron-checkpoints shards --vocab-size 50257
$ megazoo convert outputs/checkpoint/step-1000 shards
$ megazoo convert runs/a for-fsdp --to dcp

SOURCE is a Hugging Face directory, org/name[@revision] on the Hugging Face hub, a megazoo
checkpoint, a checkpoint of torch.distributed.checkpoint (of FSDP2 or torchtitan, with the model's
config.json in it or in its parent), a Megatron-LM checkpoint (torch_dist or torch; without its
optimizer state), or a GGUF file (quantized weights become fp32). Shards and --to dcp include the
optimizer state of the first two kinds of checkpoints. Checkpoints also load in other parallel
layouts, but shards that match the layout load faster. --adapter merges a LoRA adapter into the
weights, in fp32, rounded once. With --to hf, dcp and gguf, a checkpoint of adapters is merged into
the base that it names. --to peft writes the adapters of such a checkpoint without their base.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from megazoo.checkpoint.ownership import check_replaceable
from megazoo.cli.flags import parse_flags
from megazoo.cli.options import ConversionOptions
from megazoo.cli.parsing import required
from megazoo.errors import UserError
from megazoo.formats.dcp.export import blocks_of, write_dcp
from megazoo.formats.gguf.export import write_gguf
from megazoo.formats.hugging_face.export import parse_size, write_hugging_face
from megazoo.formats.megatron.source import MegatronCheckpoint, is_megatron
from megazoo.formats.resharding import write_shards
from megazoo.formats.source import AveragedModel, ModelSource
from megazoo.hub import name_of
from megazoo.lora.export import write_peft
from megazoo.lora.merged import MergedSource
from megazoo.lora.source import SavedAdapters, open_beside, open_model_or_adapters
from megazoo.settings import File, unset
from megazoo.terminal import byte_bar, note_rank_0
from megazoo.trainer.adapters import open_with_base


@dataclass
class Options(ConversionOptions):
    """Conversion."""

    to: Literal["shards", "hf", "dcp", "peft", "gguf"] = "shards"
    """Output format. shards: a megazoo checkpoint with one file per (tp, pp) rank. hf: a Hugging
    Face directory. dcp: a checkpoint of torch.distributed.checkpoint, with optimizer state. peft:
    the adapters of a LoRA checkpoint in the format of PEFT. gguf: a GGUF file for llama.cpp."""
    tp: Annotated[int | None, unset("INT", "1")] = None
    """Tensor-parallel size of the shards. They also load in any other layout."""
    pp: Annotated[int | None, unset("INT", "1")] = None
    """Pipeline-parallel size of the shards."""
    ema: bool = False
    """Write the exponential moving average of the weights, which a run with --ema stores in its
    checkpoints, in place of the weights."""
    adapter: File = None
    """LoRA adapter to merge into the weights: a PEFT directory, or the checkpoint of a LoRA run."""
    max_shard_size: Annotated[str | None, unset("SIZE", "5GB")] = None
    """Maximum file size in a Hugging Face directory: in bytes, or with a unit (MB, GiB)."""
    quantize: Annotated[Literal["q8_0"] | None, unset("TYPE", "none")] = None
    """Quantization of the matrices of a GGUF file. q8_0: 8 bits per weight, one scale per 32
    weights."""
    iteration: Annotated[int | None, unset("INT", "the last")] = None
    """Iteration to read from a Megatron-LM directory."""
    vocab_size: Annotated[
        int | None, unset("INT", "the arguments', the tokenizer's, or the padded size")
    ] = None
    """True vocabulary size of a Megatron-LM checkpoint. The checkpoint stores a padded size."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    path, output = required(options, "source", "output")
    check_target(options)
    source = open_from(path, options)
    if options.adapter:
        adapters, config = open_beside(options.adapter, source, verify=options.verify)
        if options.to != "gguf":
            check_replaceable(output, options.overwrite, adapters.path)
        source = MergedSource(source, adapters, config)
    writers = {"shards": to_shards, "hf": to_hf, "dcp": to_dcp, "peft": to_peft, "gguf": to_gguf}
    print(writers[options.to](source, output, options))


def check_target(options: Options) -> None:
    """Raise UserError for flags that belong to another output format."""
    belongs = {"tp": "shards", "pp": "shards", "max_shard_size": "hf", "quantize": "gguf"}
    for name, target in belongs.items():
        if getattr(options, name) is not None and target != options.to:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} belongs to --to {target}: omit it with --to {options.to}")
    if options.adapter and options.to == "peft":
        raise UserError(
            "--adapter merges an adapter into a model: omit it with --to peft, and pass the "
            "checkpoint of a LoRA run as SOURCE"
        )
    if options.quantize and options.dtype:
        raise UserError("--quantize and --dtype both set the format of matrices: use only one")


def open_from(path: Path, options: Options) -> ModelSource:
    """Open the source, and set options.adapter if the source is a checkpoint of adapters."""
    if is_megatron(path) and not options.ema:
        return MegatronCheckpoint(path, iteration=options.iteration, vocab_size=options.vocab_size)
    for name in ("iteration", "vocab_size"):
        if getattr(options, name) is not None:
            flag = name.replace("_", "-")
            raise UserError(
                f"--{flag} is for Megatron-LM checkpoints, which {path} is not: omit it"
            )
    if options.ema:
        if options.adapter:
            raise UserError("--ema cannot be used with --adapter: omit one of them")
        return AveragedModel(path, verify=options.verify)
    if options.to == "peft" or (options.to == "shards" and not options.adapter):
        return open_model_or_adapters(path, verify=options.verify)
    source, options.adapter, note = open_with_base(path, options.adapter, options.verify)
    if note:
        note_rank_0(note)
    return source


def to_shards(source: ModelSource, output: Path, options: Options) -> str:
    """Write shards; return the line to print."""
    tp, pp = options.tp or 1, options.pp or 1
    common = {"dtype": options.torch_dtype, "overwrite": options.overwrite}
    with byte_bar(source.total_bytes(options.torch_dtype), "convert") as bar:
        write_shards(source, output, tp, pp, **common, progress=bar.update)
    return f"wrote {output}: {_contents(source)}, tp {tp} x pp {pp}; it loads in any layout"


def _contents(source: ModelSource) -> str:
    """Describe what is written with the optimizer state."""
    weights = "adapters" if isinstance(source, SavedAdapters) else "weights"
    state = f"{weights} and optimizer state" if source.has_states else weights
    name = name_of(source.path) or source.path.name
    return f"{source.model.__name__}, {state} of {name}"


def to_dcp(source: ModelSource, output: Path, options: Options) -> str:
    """Write a checkpoint of torch.distributed.checkpoint; return the line to print."""
    common = {"dtype": options.torch_dtype, "overwrite": options.overwrite}
    size = sum(block.values.nbytes for block in blocks_of(source, options.torch_dtype))
    with byte_bar(size, "convert") as bar:
        write_dcp(source, output, **common, progress=bar.update)
    return f"wrote {output}: {_contents(source)}; torch.distributed.checkpoint.load reads it"


def to_hf(source: ModelSource, output: Path, options: Options) -> str:
    """Write a Hugging Face directory; return the line to print."""
    common = {"dtype": options.torch_dtype, "overwrite": options.overwrite}
    limit = parse_size(options.max_shard_size or "5GB")
    with byte_bar(source.weight_bytes(options.torch_dtype), "convert") as bar:
        write_hugging_face(source, output, **common, max_shard_size=limit, progress=bar.update)
    loads = ""  # transformers has the families of megazoo, but no custom ones
    if source.model.__module__.startswith("megazoo."):
        theirs = "SequenceClassification" if source.config.num_labels else "CausalLM"
        loads = f": transformers' AutoModelFor{theirs}.from_pretrained({str(output)!r}) loads it"
    return f"wrote {output}{loads}"


def to_peft(source: ModelSource, output: Path, options: Options) -> str:
    """Write the adapters of a checkpoint in the format of PEFT; return the line to print."""
    if not isinstance(source, SavedAdapters):
        raise UserError(
            f"--to peft needs the checkpoint of a LoRA run: {source.path} holds a complete model"
        )
    common = {"dtype": options.torch_dtype, "overwrite": options.overwrite}
    with byte_bar(source.weight_bytes(options.torch_dtype), "convert") as bar:
        write_peft(source, output, **common, progress=bar.update)
    base = source.base_path or "a model with random weights"
    return (
        f"wrote {output}: PEFT's PeftModel.from_pretrained(model, {str(output)!r}) loads it; its "
        f"base is {base}"
    )


def to_gguf(source: ModelSource, output: Path, options: Options) -> str:
    """Write a GGUF file; return the line to print."""
    common = {"dtype": options.torch_dtype, "overwrite": options.overwrite}
    with byte_bar(source.weight_bytes(options.torch_dtype), "convert") as bar:
        left_out = write_gguf(
            source, output, **common, q8_0=options.quantize == "q8_0", progress=bar.update
        )
    tokenizer = f", without a tokenizer: {left_out}" if left_out else ", with its tokenizer"
    return f"wrote {output}: {source.model.__name__}{tokenizer}"
