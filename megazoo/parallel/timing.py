"""What the time of a step is spent on, and the names of its parts in a profiler's trace."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megazoo.torch_internals import profiler_runs

PARTS = ("data", "forward", "backward", "communication", "optimizer")
_running: "Stopwatch | None" = None


class Stopwatch:
    """Within `with stopwatch:` splits time among the parts that `spent` names.

    By the wall clock; on CUDA by events in the stream, which nothing waits for: end the block, and
    ask for `times`, where the device has been waited for anyway. seconds: of the whole block, by
    the wall clock.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        # a part, and when it began: the time, or an event
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
        """Count for `part` from now on; returns what it was before."""
        if self._cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        before = self._marks[-1][0] if self._marks else part
        self._marks.append((part, now))
        return before

    def times(self) -> dict[str, float]:
        """Seconds of each of PARTS."""
        times = dict.fromkeys((*PARTS, "other"), 0.0)
        for (part, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            times[part] += begin.elapsed_time(end) / 1000 if self._cuda else end - begin
        return {part: times[part] for part in PARTS}


@contextmanager
def spent(part: str, name: str | None = None) -> Iterator[None]:
    """Count this block's time for a part, if a Stopwatch runs; a block within it counts for itself.

    A profiler that runs shows the block as `name`, by default the part's.
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
