"""Convert a Hugging Face model directory to shards for tensor and pipeline parallelism, one tensor at a time.

$ python tools/convert_hf.py path/to/llama shards --tp 2 --pp 4 --dtype bfloat16
"""

from dataclasses import dataclass

from megazoo.checkpoint import HuggingFaceDirectory
from megazoo.checkpoint.convert import total_bytes, write_shards
from megazoo.config import Argument, ConversionOptions, parse_flags, required
from megazoo.launch import run_program
from megazoo.metrics import byte_bar


@dataclass
class Options(ConversionOptions):
    """Hugging Face directory to shards."""

    source: Argument = None
    """Hugging Face directory: config.json and safetensors or .bin files."""
    output: Argument = None
    """Directory to write."""
    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Pipeline-parallel size."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    path, output = required(options, "source", "output")
    source, dtype = HuggingFaceDirectory(path), options.torch_dtype
    with byte_bar(total_bytes(source, dtype)) as told:
        write_shards(
            source, output, options.tp, options.pp, dtype=dtype, overwrite=options.overwrite, progress=told.update
        )
    print(f"wrote {output}: {source.model.__name__}, tp {options.tp} x pp {options.pp}; it loads in any layout")


if __name__ == "__main__":
    run_program(main)
