"""Run functions and commands alternately (A B A B ...) and measure each run."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from benchmarks.memory import resident
from benchmarks.results import Result

from megazoo.errors import UserError
from megazoo.testing import RankPool

TOOLS = Path(__file__).parent.parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def on_ranks(function: Callable, ranks: int, *arguments, **options) -> list:
    """Run a function on new processes that are the ranks of one world (see RankPool). Return their
    results."""
    pool = RankPool()
    try:
        return pool.run(function, ranks, *arguments, timeout=3600, **options)
    finally:
        pool.close()


def alone(function: Callable, *arguments, **options):
    """Run a function in a new process and return its result."""
    return on_ranks(function, 1, *arguments, **options)[0]


def seconds_in_turn(sides: list[Callable[[], object]], pairs: int) -> list[list[float]]:
    """Return the seconds of each run per side. The first run of each side is not counted."""
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(pairs + 1):
        for times, run in zip(seconds, sides, strict=True):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
    return [times[1:] for times in seconds]


class Job(NamedTuple):
    """A training job to measure.

    Attributes:
        ranks: Number of ranks.
        make: Function that is called on each rank and returns a function that runs a step.
        arguments: Arguments of `make`.
        module: Module that is imported before the memory measurement starts.
    """

    ranks: int
    make: Callable[..., Callable[[], object]]
    arguments: tuple
    module: str = "transformers"


def jobs_in_turn(jobs: list[Job], pairs: int) -> list[tuple[list[float], int]]:
    """Return the seconds per step and the memory of each job. The first step is not counted.

    Each job has separate processes. Its memory, in bytes, is the increase of rank 0's peak resident
    memory since before `make`, or the peak on its CUDA device.
    """
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(len(jobs)) as threads:
        turns = (os.path.join(directory, "turns"), len(jobs), pairs + 1)
        running = [
            threads.submit(on_ranks, _steps, job.ranks, job, side, *turns)
            for side, job in enumerate(jobs)
        ]
        return [each.result()[0] for each in running]


def _steps(job: Job, side: int, turns: str, sides: int, runs: int) -> tuple[list[float], int]:
    """Run the steps of a job on one of its ranks. The jobs alternate.

    Args:
        job: The job.
        side: Number of the job.
        turns: File that the jobs use to signal the end of a step.
        sides: Number of jobs.
        runs: Steps per job.

    Returns:
        Seconds and memory as in `jobs_in_turn`.
    """
    import_module(job.module)  # not part of the measured memory
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, seconds = resident("VmRSS"), []
    store, mine = dist.FileStore(turns, -1), range(side, runs * sides, sides)
    store.set_timeout(timedelta(hours=1))
    try:
        step = job.make(*job.arguments)
        for turn in mine:
            if turn:
                store.wait([str(turn - 1)])
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            seconds.append(time.perf_counter() - began)
            if dist.get_rank() == 0:
                store.set(str(turn), "done")
    except BaseException:
        for turn in mine:  # the other jobs would wait for them
            store.set(str(turn), "failed")
        raise
    on_device = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    return seconds[1:], on_device or resident("VmHWM") - before


class Side(NamedTuple):
    """Commands to measure, run one after another.

    Attributes:
        commands: The commands.
        output: Their output directory, which is removed before each run.
    """

    commands: list[list]
    output: Path

    def run(self) -> tuple[float, int]:
        """Return the seconds, and the largest peak of resident memory in bytes."""
        shutil.rmtree(self.output, ignore_errors=True)
        subprocess.run(["sync"], check=True)
        began = time.perf_counter()
        peak = max(map(_peak_of, self.commands))
        return time.perf_counter() - began, peak


def in_turn(name: str, pairs: int, ours: Side, reference: Side) -> Result:
    """Run two sides alternately. The first run of each side is not counted."""
    runs = [[side.run() for side in (ours, reference)] for _ in range(pairs + 1)]
    seconds = [[run[side][0] for run in runs[1:]] for side in range(2)]
    return Result(name, *seconds, tuple(max(run[side][1] for run in runs) for side in range(2)))


def _peak_of(command: list) -> int:
    """Run a command and return its peak resident memory in bytes."""
    words = [str(word) for word in command]
    with tempfile.TemporaryFile("w+") as told:
        child = subprocess.Popen(words, stdout=told, stderr=told)
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            told.seek(0)
            raise UserError(f"{' '.join(words)} failed: {told.read()[-500:]}", exit_code=1)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
