"""A rank of gpt2-xl: making it against filling its bytes, loading it against reading them; and what
starting takes."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmarks.common import TOOLS, Result, Setup, Side, alone, in_turn, seconds_in_turn

PRESET, TP, PP = "gpt2-xl", 2, 4


def cases(setup: Setup) -> Iterator[Result]:
    yield Result(
        f"build a rank of {PRESET} at tp 2 x pp 4, against torch.randn",
        *alone(building, setup.pairs),
    )
    with tempfile.TemporaryDirectory(dir=setup.directory, prefix="megazoo-benchmark-") as directory:
        found = alone(loading, Path(directory), setup.pairs)
        yield Result("load it from a checkpoint, against reading the file", *found)
    python, nothing = sys.executable, Path("/nonexistent")
    bare = Side([[python, "-c", "import torch"]], nothing)
    package = Side(
        [[python, "-c", "import torch, megazoo, megazoo.models, megazoo.optim"]], nothing
    )
    yield in_turn("import megazoo, against import torch", setup.pairs, package, bare)
    program = Side([[python, TOOLS.parent / "pretrain_gpt.py", "--help"]], nothing)
    yield in_turn("pretrain_gpt.py --help, against import torch", setup.pairs, program, bare)


def context():
    import megazoo

    return megazoo.ParallelContext.virtual(TP, PP, rank=1)


def building(pairs: int) -> list[list[float]]:
    import megazoo

    count = sum(
        parameter.numel() for parameter in megazoo.from_config(PRESET, context()).parameters()
    )
    return seconds_in_turn(
        [lambda: megazoo.from_config(PRESET, context()), lambda: torch.randn(count)], pairs
    )


def loading(directory: Path, pairs: int) -> list[list[float]]:
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
        [lambda: load_weights(open_source(directory / "saved"), model), read], pairs
    )
