"""What the cases share: results, and how a function or a command is run and measured."""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megazoo.errors import UserError
from megazoo.testing import RankPool

TOOLS = Path(__file__).parent.parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class Result(NamedTuple):
    """One comparison: what each run took or reached, ours and the reference's, in `unit`. memory:
    the peaks of both in bytes, where they are measured."""

    name: str
    ours: list[float]
    reference: list[float]
    memory: tuple[int, ...] = ()
    unit: str = "s"

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.ours, self.reference, strict=True)]

    def row(self) -> str:
        ratios = f"{statistics.median(self.ratios):.2f} ({min(self.ratios):.2f} to {max(self.ratios):.2f})"
        sides = (
            f"{statistics.median(side):,.3g} {self.unit}" for side in (self.ours, self.reference)
        )
        memory = (
            (f"{peak / 1e6:,.0f} MB" if peak else "" for peak in self.memory)
            if self.memory
            else "  "
        )
        return f"| {self.name} | {' | '.join(sides)} | {ratios} | {' | '.join(memory)} |"


@dataclass(frozen=True)
class Setup:
    """How to measure. pairs: runs of each side, in turn. gigabytes: of checkpoints. directory: for
    files."""

    pairs: int
    gigabytes: float
    directory: Path | None


def on_ranks(function: Callable, ranks: int, *arguments, **options) -> list:
    """What a function returns on fresh processes that are ranks of one world (see RankPool)."""
    pool = RankPool()
    try:
        return pool.run(function, ranks, *arguments, timeout=3600, **options)
    finally:
        pool.close()


def alone(function: Callable, *arguments, **options):
    """What a function returns in a fresh process."""
    return on_ranks(function, 1, *arguments, **options)[0]


def seconds_in_turn(sides: list[Callable[[], object]], pairs: int) -> list[list[float]]:
    """Of each run of each side: A B A B ..., after one of each that does not count."""
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(pairs + 1):
        for times, run in zip(seconds, sides, strict=True):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
    return [times[1:] for times in seconds]


class Job(NamedTuple):
    """What is timed: steps of processes that are ranks of one world. make(*arguments), called on
    each, returns a function that does one."""

    ranks: int
    make: Callable[..., Callable[[], object]]
    arguments: tuple


def jobs_in_turn(jobs: list[Job], pairs: int) -> list[tuple[list[float], int]]:
    """Of each job, which has processes of its own, as it would be used: the seconds of its steps, A
    B A B ..., after one of each that does not count, and the most resident memory of rank 0 above
    that before `make`, or on its CUDA device."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(len(jobs)) as threads:
        turns = (os.path.join(directory, "turns"), len(jobs), pairs + 1)
        running = [
            threads.submit(on_ranks, _steps, job.ranks, job, side, *turns)
            for side, job in enumerate(jobs)
        ]
        return [each.result()[0] for each in running]


def _steps(job: Job, side: int, turns: str, sides: int, runs: int) -> tuple[list[float], int]:
    import transformers  # noqa: F401, part of the level before

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, seconds = resident("VmRSS"), []
    step, store = job.make(*job.arguments), dist.FileStore(turns, -1)
    store.set_timeout(timedelta(hours=1))
    for turn in range(side, runs * sides, sides):
        if turn:
            store.wait([str(turn - 1)])
        dist.barrier()
        began = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        if dist.get_rank() == 0:
            store.set(str(turn), "done")
    on_device = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    return seconds[1:], on_device or resident("VmHWM") - before


def resident(name: str) -> int:
    """VmRSS, this process's resident memory, or VmHWM, its peak, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Side(NamedTuple):
    """What is timed: commands, one after the other. output: what they write; it is removed before."""

    commands: list[list]
    output: Path

    def run(self) -> tuple[float, int]:
        """Seconds, and the largest peak of resident memory, bytes."""
        shutil.rmtree(self.output, ignore_errors=True)
        subprocess.run(["sync"], check=True)
        began = time.perf_counter()
        peak = max(map(process, self.commands))
        return time.perf_counter() - began, peak


def in_turn(name: str, pairs: int, ours: Side, reference: Side) -> Result:
    """Run A B A B ..., after one run of each that isn't counted."""
    runs = [[side.run() for side in (ours, reference)] for _ in range(pairs + 1)]
    seconds = [[run[side][0] for run in runs[1:]] for side in range(2)]
    return Result(name, *seconds, tuple(max(run[side][1] for run in runs) for side in range(2)))


def process(command: list) -> int:
    """Run a command to its end; returns its peak resident memory."""
    words = [str(word) for word in command]
    with tempfile.TemporaryFile("w+") as told:
        child = subprocess.Popen(words, stdout=told, stderr=told)
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            told.seek(0)
            raise UserError(f"{' '.join(words)} failed: {told.read()[-500:]}", exit_code=1)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def proportional(command: list, kind: str = "Pss") -> int:
    """Run a command to its end; returns the peak of its processes' memory together, bytes: the sum
    of their PSS.

    kind: "Pss_Anon" leaves out the pages of files, which the system may take back.
    """
    child = subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    peak = 0
    while child.poll() is None:
        peak = max(peak, sum(pss(pid, kind) for pid in family(child.pid)))
        time.sleep(0.2)
    if child.returncode:
        raise UserError(f"{' '.join(map(str, command))} failed", exit_code=1)
    return peak


def family(pid: int) -> list[int]:
    """A process and those that came of it."""
    try:
        children = [
            int(word)
            for file in Path(f"/proc/{pid}/task").glob("*/children")
            for word in file.read_text().split()
        ]
    except OSError:  # it has just ended
        return []
    return [pid, *(each for child in children for each in family(child))]


def pss(pid: int, kind: str) -> int:
    """Proportional set size, bytes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:")), 0)
