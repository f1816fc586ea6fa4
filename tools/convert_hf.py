"""Convert a Hugging Face model directory to shards for tensor and pipeline parallelism, piece by
piece.

$ python tools/convert_hf.py path/to/llama shards --tp 2 --pp 4 --dtype bfloat16
"""

from megazoo.cli.flags import parse_flags
from megazoo.cli.options import ShardingOptions
from megazoo.cli.parsing import required
from megazoo.cli.program import run_program
from megazoo.models.hugging_face.directory import HuggingFaceDirectory
from megazoo.models.resharding import write_shards
from megazoo.terminal import byte_bar


def main(arguments: list[str]) -> None:
    options = parse_flags(ShardingOptions, arguments, __doc__)
    path, output = required(options, "source", "output")
    source = HuggingFaceDirectory(path)
    with byte_bar(source.total_bytes(options.torch_dtype)) as bar:
        write_shards(
            source,
            output,
            options.tp,
            options.pp,
            dtype=options.torch_dtype,
            overwrite=options.overwrite,
            progress=bar.update,
        )
    layout = f"tp {options.tp} x pp {options.pp}"
    print(f"wrote {output}: {source.model.__name__}, {layout}; it loads in any layout")


if __name__ == "__main__":
    run_program(main)
