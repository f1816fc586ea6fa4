"""Run ours and a reference in turn, A B A B, on the same weights, data and threads, and print how
they compare.

$ python tools/benchmark.py checkpoint --json results.json

A case is a program in tools/benchmarks/cases/, which says what it compares. `scaling` compares with
laws instead, how the cost of ours grows, prints other tables, and is not part of `all`:

$ python tools/benchmark.py scaling --pairs 3 --picture docs/scaling.png
"""

import json
import os
import platform
import statistics
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import torch
import tyro
from benchmarks import laws, picture
from benchmarks.results import Setup

from megazoo.cli.flags import parse_flags
from megazoo.cli.program import run_program
from megazoo.errors import UserError
from megazoo.files import write_text
from megazoo.settings import File

CASES = (
    "train", "muon", "experts", "sequence", "lora", "parallel", "pipeline", "build", "generate",
    "checkpoint", "data", "plan", "gpu", "gpu_rows", "scaling",
)  # fmt: skip
COLUMNS = (
    "case",
    "ours",
    "reference",
    "ratio: median (range)",
    "peak memory of ours",
    "of the reference",
)


@dataclass
class Options:
    """What to compare."""

    case: tyro.conf.Positional[
        Annotated[str, tyro.conf.arg(metavar="{" + ",".join((*CASES, "all")) + "}")]
    ] = "all"
    """Name of the comparison to run, or all."""
    pairs: int = 5
    """Number of alternating runs of each side, or of each size, after one warm-up run."""
    gigabytes: float = 4.0
    """Size of the model whose checkpoints are converted; `scaling` converts a quarter of it, and
    less."""
    directory: File = None
    """Directory for the measured files, with room for five such models. By default, it is the
    temporary directory."""
    rows: str = ""
    """Comma-separated rows of `gpu_rows`. By default, all rows are measured."""
    tiny: bool = False
    """Run `gpu_rows` with tiny models on the CPU, to try it."""
    json: File = None
    """File for the numbers."""
    picture: File = None
    """PNG file for the curves of `scaling`. It needs matplotlib."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    os.environ |= {
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
    }
    if options.case not in (*CASES, "all"):
        raise UserError(f"unknown case {options.case!r}: use one of {', '.join(CASES)}, or all")
    if options.picture:
        if options.case != "scaling":
            raise UserError("--picture draws the curves of the case scaling: pass that case")
        picture.pyplot()  # raises before the measurements if matplotlib is missing
    if (options.rows or options.tiny) and options.case != "gpu_rows":
        raise UserError("--rows and --tiny are options of the case gpu_rows: pass that case")
    rows = tuple(filter(None, options.rows.split(",")))
    setup = Setup(options.pairs, options.gigabytes, options.directory, rows, options.tiny)
    print(f"{machine()}\n")
    if options.case == "scaling":
        values = grow(setup, options.picture)
    else:
        values = compare(options.case, setup)
    if options.json:
        text = json.dumps({"machine": machine(), "results": values}, indent=1)
        write_text("--json", options.json, text + "\n")


def compare(case: str, setup: Setup) -> list[dict]:
    """Print the table of a case, or of all cases, and return the results as values for JSON."""
    cases = [case]
    if case == "all":
        cases = [each for each in CASES if each not in ("gpu", "gpu_rows", "scaling")]
        cases += ["gpu"] if torch.cuda.is_available() else []
    print(laws.heading(COLUMNS))
    results = []
    for each in cases:
        for result in import_module(f"benchmarks.cases.{each}").cases(setup):
            results.append(result)
            print(result.row(), flush=True)
    return [
        {**result._asdict(), "median_ratio": statistics.median(result.ratios)} for result in results
    ]


def grow(setup: Setup, file: Path | None) -> list[dict]:
    """Print the tables of `scaling`, draw them in a file, and return the curves as values for
    JSON."""
    from benchmarks.cases import scaling

    print(laws.heading(laws.POINT_COLUMNS))
    curves = []
    for curve in scaling.curves(setup):
        curves.append(curve)
        print("\n".join(curve.rows()), flush=True)
    print(f"\n{laws.heading(laws.LAW_COLUMNS)}")
    for curve in curves:
        print("\n".join(curve.law_rows()))
    if file:
        picture.draw(curves, file)
    return [curve.as_dict() for curve in curves]


def machine() -> str:
    """Describe the machine."""
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpus = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return (
        f"{os.cpu_count()} x {cpus[0] if cpus else platform.machine()}, {memory:.0f} GiB, Python "
        f"{platform.python_version()}, torch {torch.__version__}"
        + "".join(f", {name}" for name in devices)
    )


if __name__ == "__main__":
    run_program(main)
