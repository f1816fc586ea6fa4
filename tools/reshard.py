"""Cut a checkpoint for another layout, optimizer state included, one tensor at a time.

$ python tools/reshard.py runs/a resharded --tp 4 --pp 1

Training and loading do this by themselves; it saves reading across shards where a checkpoint is loaded again and again.
"""

from dataclasses import dataclass

from megazoo.checkpoint import Checkpoint
from megazoo.checkpoint.convert import total_bytes, write_shards
from megazoo.config import Argument, ConversionOptions, parse_flags, required
from megazoo.launch import run_program
from megazoo.metrics import byte_bar


@dataclass
class Options(ConversionOptions):
    """Shards of one layout to shards of another."""

    source: Argument = None
    """Checkpoint: a step's directory, or the one above for the latest."""
    output: Argument = None
    """Directory to write."""
    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Pipeline-parallel size."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    path, output = required(options, "source", "output")
    source, dtype = Checkpoint(path), options.torch_dtype
    with byte_bar(total_bytes(source, dtype)) as told:
        write_shards(
            source, output, options.tp, options.pp, dtype=dtype, overwrite=options.overwrite, progress=told.update
        )
    state = "weights and optimizer state" if source.has_states else "weights"
    print(f"wrote {output}: {state} of {source.path.name}, tp {options.tp} x pp {options.pp}")


if __name__ == "__main__":
    run_program(main)
