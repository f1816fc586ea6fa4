"""Stages of the pipeline, and the distribution of layers over them."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from megazoo.errors import UserError
from megazoo.parallel.placement import Placement


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
    placement: Placement | None = None,
) -> list[Stage]:
    """Divide `layers` layers into `count` contiguous stages.

    Args:
        layers: the number of layers.
        count: the number of stages.
        how: "uniform", "balanced", or the number of layers of each stage. "balanced" minimizes the
            time of the slowest stage, or, with the placement "v", of the slowest rank and then of
            its slowest stage. Each layer is added where it is cheapest, earlier stages first. With
            equal layers this is optimal.
        costs: of a layer, of the modules before the layers (embedding), and of those after them
            (head).
        placement: of the stages on ranks; default: "loop".

    Raises:
        UserError: another `how`, or too few layers.
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
        ranks = tuple(range(count))  # "loop": each stage as if on a rank of its own
        if placement is not None and placement.name == "v":
            ranks = tuple(map(placement.rank_of, ranks))
        counts = _balanced(layers, ranks, layer, first, last)
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
def _balanced(
    layers: int, ranks: tuple[int, ...], layer: float, first: float, last: float
) -> tuple[int, ...]:
    """Return the number of layers of each stage that minimizes the time of the slowest rank, and
    then of the slowest stage. ranks: of the stages, in the order of the forward."""
    loads, counts = [0.0 for _ in ranks], [0 for _ in ranks]
    loads[0] += first
    loads[-1] += last
    of_ranks = [0.0 for _ in ranks]
    of_ranks[ranks[0]] += first
    of_ranks[ranks[-1]] += last
    for _ in range(layers):
        stage = min(range(len(ranks)), key=lambda stage: (of_ranks[ranks[stage]], loads[stage]))
        counts[stage] += 1
        loads[stage] += layer
        of_ranks[ranks[stage]] += layer
    return tuple(counts)
