"""Run ours and a reference in turn, A B A B, on the same weights, data and threads, and print how
they compare.

$ python tools/benchmark.py checkpoint --json results.json

A case is a program in tools/benchmarks/cases/, which says what it compares.
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
from benchmarks.results import Setup

from megazoo.cli.flags import File, parse_flags
from megazoo.cli.launch import run_program
from megazoo.errors import UserError
from megazoo.files import write_text

CASES = (
    "train", "sequence", "lora", "parallel", "pipeline", "build", "generate", "checkpoint", "data",
    "plan", "gpu",
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
    """Which comparison."""
    pairs: int = 5
    """Runs of each side, in turn, after one of each that does not count."""
    gigabytes: float = 4.0
    """Size of the model whose checkpoints are converted."""
    directory: File = None
    """Where to write what is measured: a disk with room for five such models; the temporary
    directory by default."""
    json: File = None
    """File for the numbers."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    os.environ |= {
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
    }
    if options.case not in (*CASES, "all"):
        raise UserError(f"no case {options.case}: there are {', '.join(CASES)} and all")
    cases = [options.case]
    if options.case == "all":
        cases = [case for case in CASES if case != "gpu" or torch.cuda.is_available()]
    setup = Setup(options.pairs, options.gigabytes, options.directory)
    print(f"{machine()}\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"| {' | '.join('---' for _ in COLUMNS)} |")
    results = []
    for case in cases:
        for result in import_module(f"benchmarks.cases.{case}").cases(setup):
            results.append(result)
            print(result.row(), flush=True)
    if options.json:
        values = [
            {**result._asdict(), "median_ratio": statistics.median(result.ratios)}
            for result in results
        ]
        text = json.dumps({"machine": machine(), "results": values}, indent=1)
        write_text("--json", options.json, text + "\n")


def machine() -> str:
    """Say what the numbers were measured on."""
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
