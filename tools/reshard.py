"""Cut a checkpoint for another layout, optimizer state included, piece by piece.

$ python tools/reshard.py runs/a resharded --tp 4 --pp 1

Training and loading do this by themselves; it saves reading across shards where a checkpoint is
loaded again and again.
"""

from megazoo.cli.flags import parse_flags
from megazoo.cli.options import ShardingOptions
from megazoo.cli.parsing import required
from megazoo.cli.program import run_program
from megazoo.lora.source import SavedAdapters, open_model_or_adapters
from megazoo.models.resharding import write_shards
from megazoo.terminal import byte_bar


def main(arguments: list[str]) -> None:
    options = parse_flags(ShardingOptions, arguments, __doc__)
    path, output = required(options, "source", "output")
    source = open_model_or_adapters(path, verify=options.verify)
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
    weights = "adapters" if isinstance(source, SavedAdapters) else "weights"
    state = f"{weights} and optimizer state" if source.has_states else weights
    print(f"wrote {output}: {state} of {source.path.name}, tp {options.tp} x pp {options.pp}")


if __name__ == "__main__":
    run_program(main)
