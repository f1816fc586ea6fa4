"""The vocabulary of pipeline schedules: an action, a schedule, its placement."""

from collections.abc import Callable
from typing import Any, NamedTuple

from megazoo.parallel.placement import Placement


class Action(NamedTuple):
    """One action of a rank: one micro-batch in one stage. For the ranks of stages see placement.py.

    kind: "F": forward; "B": backward; or backward in two parts: "I" of the inputs, "W" of the
    weights.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} stage {self.stage} micro-batch {self.microbatch}"


# schedule(rank, pp, virtual, microbatches) returns the actions of a rank, in order. virtual: the
# number of stages per rank.
Schedule = Callable[[int, int, int, int], list[Action]]


def placed(placement: str) -> Callable[[Schedule], Schedule]:
    """Decorate a schedule with its placement, e.g. `@placed("v")`: see placement.py. Default:
    "loop"."""

    def mark(schedule: Any) -> Schedule:
        schedule.placement = placement
        return schedule

    return mark


def placement_of(schedule: Schedule, pp: int, virtual: int) -> Placement:
    """Return the placement of a schedule. UserError if it does not support this number of stages
    per rank."""
    return Placement(getattr(schedule, "placement", "loop"), pp, virtual)


def source_of(action: Action, last: int) -> Action | None:
    """Return the action of another stage that computes the input of an action, or None.

    last: the last stage.
    """
    if action.kind == "F":
        return action._replace(stage=action.stage - 1) if action.stage else None
    if action.kind == "W" or action.stage == last:
        return None
    return action._replace(stage=action.stage + 1)


def in_flight(table: list[Action]) -> int:
    """Return the largest number of micro-batches of a rank's stages whose activations are in memory
    together: from F until B, or W."""
    held = peak = 0
    for action in table:
        held += HELD[action.kind]
        peak = max(peak, held)
    return peak


# The change of the number of activations in memory by each kind of action.
HELD = {"F": 1, "B": -1, "I": 0, "W": -1}
