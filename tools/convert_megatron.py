"""Convert a checkpoint of Megatron-LM to shards for tensor and pipeline parallelism, or to a
Hugging Face model directory, piece by piece, without Megatron-LM.

$ python tools/convert_megatron.py path/to/checkpoints shards --tp 2 --pp 4
$ python tools/convert_megatron.py path/to/checkpoints hf --hugging-face --vocab-size 50257

The formats are torch_dist and torch. Optimizer state is left behind.
"""

from dataclasses import dataclass

from megazoo.cli.flags import Argument, optional, parse_flags
from megazoo.cli.options import ShardingOptions
from megazoo.cli.parsing import required
from megazoo.cli.program import run_program
from megazoo.errors import UserError
from megazoo.models.hugging_face.export import write_hugging_face
from megazoo.models.megatron.source import MegatronCheckpoint
from megazoo.models.resharding import write_shards
from megazoo.terminal import byte_bar


@dataclass
class Options(ShardingOptions):
    """From Megatron-LM."""

    source: Argument = None
    """Directory of Megatron-LM's checkpoints, as its --save names it, or of one iteration."""
    hugging_face: bool = False
    """Write a Hugging Face directory instead of shards."""
    iteration: optional(int, "INT", "the last") = None
    """Which iteration of the directory."""
    vocab_size: optional(int, "INT", "the arguments', the tokenizer's, or the padded size") = None
    """True size of the vocabulary, which Megatron-LM pads."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    path, output = required(options, "source", "output")
    if options.hugging_face and (options.tp, options.pp) != (1, 1):
        raise UserError("--hugging-face writes no shards: leave out --tp and --pp")
    source = MegatronCheckpoint(path, iteration=options.iteration, vocab_size=options.vocab_size)
    common = {"dtype": options.torch_dtype, "overwrite": options.overwrite}
    with byte_bar(source.total_bytes(options.torch_dtype)) as bar:
        if options.hugging_face:
            write_hugging_face(source, output, **common, progress=bar.update)
        else:
            write_shards(source, output, options.tp, options.pp, **common, progress=bar.update)
    layout = f"tp {options.tp} x pp {options.pp}; it loads in any layout"
    kind = "a Hugging Face directory" if options.hugging_face else layout
    print(f"wrote {output}: {source.model.__name__} of {source.path.name}, {kind}")


if __name__ == "__main__":
    run_program(main)
