"""Merge the shards of a checkpoint into a complete Hugging Face model directory, one tensor at a time.

$ python tools/merge_shards.py runs/a merged --max-shard-size 5GB
"""

from dataclasses import dataclass

from megazoo.checkpoint import Checkpoint
from megazoo.checkpoint.convert import parse_size, weight_bytes, write_hugging_face
from megazoo.config import Argument, ConversionOptions, parse_flags, required
from megazoo.launch import run_program
from megazoo.metrics import byte_bar


@dataclass
class Options(ConversionOptions):
    """Shards to a Hugging Face directory."""

    source: Argument = None
    """Checkpoint: a step's directory, or the one above for the latest."""
    output: Argument = None
    """Directory to write."""
    max_shard_size: str = "5GB"
    """Largest file: bytes, or with a unit such as MB or GiB."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    path, output = required(options, "source", "output")
    limit = parse_size(options.max_shard_size)
    source, dtype = Checkpoint(path), options.torch_dtype
    with byte_bar(weight_bytes(source, dtype)) as told:
        write_hugging_face(
            source, output, dtype=dtype, max_shard_size=limit, overwrite=options.overwrite, progress=told.update
        )
    print(f"wrote {output}: transformers' AutoModelForCausalLM.from_pretrained({str(output)!r}) loads it")


if __name__ == "__main__":
    run_program(main)
