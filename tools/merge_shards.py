"""Merge the shards of a checkpoint into a complete Hugging Face model directory, piece by piece.

$ python tools/merge_shards.py runs/a merged --max-shard-size 5GB
$ python tools/merge_shards.py path/to/llama merged --adapter adapter

With --adapter, the change that a LoRA adapter makes is added to the weights on the way: in fp32,
rounded once.
"""

from dataclasses import dataclass

from megazoo.checkpoint.ownership import check_replaceable
from megazoo.cli.flags import File, parse_flags
from megazoo.cli.options import ConversionOptions
from megazoo.cli.parsing import required
from megazoo.cli.program import run_program
from megazoo.lora.merged import MergedSource
from megazoo.lora.source import open_beside
from megazoo.models.hugging_face.export import parse_size, write_hugging_face
from megazoo.models.pretrained import open_source
from megazoo.terminal import byte_bar


@dataclass
class Options(ConversionOptions):
    """Shards to a Hugging Face directory."""

    max_shard_size: str = "5GB"
    """Largest file: bytes, or with a unit such as MB or GiB."""
    adapter: File = None
    """Directory of a LoRA adapter to merge, PEFT's or megazoo.lora.save's, or the checkpoint of a
    run with adapters."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    path, output = required(options, "source", "output")
    limit = parse_size(options.max_shard_size)
    source = open_source(path, verify=options.verify)
    if options.adapter:
        adapters, config = open_beside(options.adapter, source, verify=options.verify)
        check_replaceable(output, options.overwrite, adapters.path)
        source = MergedSource(source, adapters, config)
    with byte_bar(source.weight_bytes(options.torch_dtype)) as bar:
        write_hugging_face(
            source,
            output,
            dtype=options.torch_dtype,
            max_shard_size=limit,
            overwrite=options.overwrite,
            progress=bar.update,
        )
    loads = ""  # transformers knows our families, not those of users
    if source.model.__module__.startswith("megazoo."):
        theirs = "SequenceClassification" if source.config.num_labels else "CausalLM"
        loads = f": transformers' AutoModelFor{theirs}.from_pretrained({str(output)!r}) loads it"
    print(f"wrote {output}{loads}")


if __name__ == "__main__":
    run_program(main)
