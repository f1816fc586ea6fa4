"""Where a step's time goes: every moment is counted once, for the innermost part."""

from contextlib import suppress

import pytest
import torch

from megazoo.parallel import timing
from megazoo.parallel.timing import Stopwatch, spent

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test turns."""
    now = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def turn(seconds):
        now[0] += seconds

    return turn


def test_an_inner_part_is_not_the_outer_ones(clock):
    with Stopwatch(CPU) as watch:
        clock(1)
        with spent("forward"):
            clock(2)
            with spent("communication"):
                clock(4)
            clock(8)
        with suppress(KeyError), spent("backward"):
            clock(16)
            raise KeyError
        clock(32)
    expected = {"data": 0, "forward": 10, "backward": 16, "communication": 4, "optimizer": 0}
    assert (watch.times(), watch.seconds) == (expected, 63)
    with spent("forward"):  # none runs
        clock(1)
    assert watch.times() == expected
