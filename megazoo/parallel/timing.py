"""Measure the parts of a step's time, and name them in profiler traces."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megazoo.torch_internals import profiler_runs

PARTS = ("data", "forward", "backward", "communication", "optimizer")
_running: "Stopwatch | None" = None


class Stopwatch:
    """Measure the time of each part that `spent` names, within `with stopwatch:`.

    It uses the wall clock, on CUDA events in the stream without synchronization. End the block and
    read `times` only after the device was synchronized for another reason. seconds: wall-clock time
    of the whole block.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        # a part, and its start: the time, or an event
        self._marks: list[tuple[str, Any]] = []
        self.seconds = 0.0

    def __enter__(self) -> "Stopwatch":
        global _running
        _running, self._began = self, time.perf_counter()
        self.turn_to("other")
        return self

    def __exit__(self, *_) -> None:
        global _running
        self.turn_to("end")
        _running, self.seconds = None, time.perf_counter() - self._began

    def turn_to(self, part: str) -> str:
        """Measure `part` from now on, and return the previous part."""
        if self._cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        before = self._marks[-1][0] if self._marks else part
        self._marks.append((part, now))
        return before

    def times(self) -> dict[str, float]:
        """Return the seconds of each of PARTS."""
        times = dict.fromkeys((*PARTS, "other"), 0.0)
        for (part, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            times[part] += begin.elapsed_time(end) / 1000 if self._cuda else end - begin
        return {part: times[part] for part in PARTS}


@contextmanager
def spent(part: str, name: str | None = None) -> Iterator[None]:
    """Measure this block as a part, if a Stopwatch is running. Nested blocks are measured
    separately.

    A running profiler shows the block as `name`, by default the name of the part.
    """
    watch = _running
    before = watch.turn_to(part) if watch else ""
    try:
        if profiler_runs():
            with torch.autograd.profiler.record_function(name or part):
                yield
        else:
            yield
    finally:
        if watch:
            watch.turn_to(before)
