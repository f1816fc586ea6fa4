"""Compare building a rank of gpt2-xl with filling its bytes, loading it with reading them, and the
start of programs with importing torch."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmarks.results import Result, Setup
from benchmarks.turns import TOOLS, Side, alone, in_turn, seconds_in_turn

PRESET, TP, PP = "gpt2-xl", 2, 4


def cases(setup: Setup) -> Iterator[Result]:
    ours, reference = alone(building, setup.pairs)
    yield Result(f"build a rank of {PRESET} at tp 2 x pp 4, against torch.randn", ours, reference)
    with tempfile.TemporaryDirectory(dir=setup.directory, prefix="megazoo-benchmark-") as directory:
        ours, reference = alone(loading, Path(directory), setup.pairs)
        yield Result("load it from a checkpoint, against reading the file", ours, reference)
    python, nothing = sys.executable, Path("/nonexistent")
    bare = Side([[python, "-c", "import torch"]], nothing)
    package = Side(
        [[python, "-c", "import torch, megazoo, megazoo.models, megazoo.optim"]], nothing
    )
    yield in_turn("import megazoo, against import torch", setup.pairs, package, bare)
    program = Side([[python, TOOLS.parent / "pretrain_gpt.py", "--help"]], nothing)
    yield in_turn("pretrain_gpt.py --help, against import torch", setup.pairs, program, bare)
    one_step = Side([[*program.commands[0][:2], "--steps", "1", "--eval-steps", "0"]], nothing)
    yield in_turn("one step of the demo, against import torch", setup.pairs, one_step, bare)


def context():
    """Return the virtual context of the measured rank."""
    import megazoo

    return megazoo.ParallelContext.virtual(TP, PP, rank=1)


def building(pairs: int) -> list[list[float]]:
    """Return the seconds to build the rank, and to draw the same number of random values."""
    import megazoo

    model = megazoo.from_config(PRESET, context())
    count = sum(parameter.numel() for parameter in model.parameters())
    del model
    return seconds_in_turn(
        [lambda: megazoo.from_config(PRESET, context()), lambda: torch.randn(count)], pairs
    )


def loading(directory: Path, pairs: int) -> list[list[float]]:
    """Return the seconds to load the rank, and to read the same number of bytes. Checksums are off,
    because one rank would verify the bytes that normally all ranks verify together."""
    import megazoo
    from megazoo.models.pretrained import load_weights, open_source

    model = megazoo.from_config(PRESET, context())
    whole = megazoo.from_config(PRESET, megazoo.ParallelContext())
    whole.save_parallelized(directory / "saved")
    del whole
    size = sum(parameter.nbytes for parameter in model.parameters())
    (file,) = (directory / "saved").glob("*.safetensors")

    def read():
        with open(file, "rb") as source:
            source.readinto(bytearray(size))

    return seconds_in_turn(
        [lambda: load_weights(open_source(directory / "saved", verify=False), model), read], pairs
    )
