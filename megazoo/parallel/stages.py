"""Stages of the pipeline, and the distribution of layers over them."""

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate

from megazoo.errors import UserError


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline: its index among `count` stages, and the global indices of its
    layers."""

    index: int
    count: int
    layers: range

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


def cut_into_stages(
    layers: int,
    count: int,
    how: str | tuple[int, ...],
    costs: tuple[float, float, float] = (1.0, 0.0, 0.0),
) -> list[Stage]:
    """Divide `layers` layers into `count` contiguous stages.

    how: "uniform", "balanced", or the number of layers of each stage. costs: of a layer, of the
    modules before the layers (embedding), and of those after them (head). "balanced" minimizes the
    time of the slowest stage: each layer is added to the stage that is cheapest with it, earlier
    stages first. With equal layers this is optimal. Raises UserError for another `how`, or too few
    layers.
    """
    if layers < count:
        raise UserError(
            f"{layers} layers can't be divided into {count} stages: use at most {layers} "
            "stages (pp x virtual-pp)"
        )
    if isinstance(how, tuple):
        if len(how) != count or sum(how) != layers or min(how) < 1:
            raise UserError(
                f"stage-layers {','.join(map(str, how))} must be {count} numbers above 0 "
                f"that add up to {layers}"
            )
        counts = how
    elif how in ("uniform", "balanced"):
        layer, first, last = costs if how == "balanced" else (1.0, 0.0, 0.0)
        counts = _balanced(layers, count, layer, first, last)
    else:
        raise UserError(
            f"stage-layers {how!r} is not valid: use balanced, uniform, or one number per "
            "stage, such as 5,6,6,5"
        )
    return [
        Stage(stage, count, range(end - n, end))
        for stage, (end, n) in enumerate(zip(accumulate(counts), counts, strict=True))
    ]


@lru_cache  # called for every rank of a plan
def _balanced(layers: int, count: int, layer: float, first: float, last: float) -> tuple[int, ...]:
    """Return the number of layers of each stage that minimizes the time of the slowest stage."""
    load, counts = [0.0] * count, [0] * count
    load[0] += first
    load[-1] += last
    cheapest_first = [(cost, stage) for stage, cost in enumerate(load)]
    heapify(cheapest_first)
    for _ in range(layers):
        cost, stage = cheapest_first[0]
        counts[stage] += 1
        heapreplace(cheapest_first, (cost + layer, stage))
    return tuple(counts)
