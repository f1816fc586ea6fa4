"""Merge the shards of a checkpoint into a complete Hugging Face model directory, piece by piece.

$ python tools/merge_shards.py runs/a merged --max-shard-size 5GB
"""

from dataclasses import dataclass

from megazoo.cli.flags import parse_flags
from megazoo.cli.launch import run_program
from megazoo.cli.options import ConversionOptions
from megazoo.cli.parsing import required
from megazoo.models.hugging_face.export import parse_size, write_hugging_face
from megazoo.models.pretrained import open_source
from megazoo.terminal import byte_bar


@dataclass
class Options(ConversionOptions):
    """Shards to a Hugging Face directory."""

    max_shard_size: str = "5GB"
    """Largest file: bytes, or with a unit such as MB or GiB."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    path, output = required(options, "source", "output")
    limit = parse_size(options.max_shard_size)
    source = open_source(path, verify=options.verify)
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
        loads = f": transformers' AutoModelForCausalLM.from_pretrained({str(output)!r}) loads it"
    print(f"wrote {output}{loads}")


if __name__ == "__main__":
    run_program(main)
