"""A V-shaped schedule with backward in two parts, as a user adds it from a file of --import: a rank
does as much of backward as there is, else a forward, else the gradients of weights."""

from functools import lru_cache

from megazoo.parallel.placement import Placement
from megazoo.parallel.schedule import SCHEDULES, Action, placed, source_of


@placed("v")
def greedy_v(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    return simulated(Placement("v", pp, virtual), microbatches)[rank]


@lru_cache
def simulated(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return what all ranks do, tick by tick, where each action takes one."""
    tables, done, pp = [[] for _ in range(placement.pp)], set(), placement.pp
    waiting = [
        [Action(kind, stage, m) for kind in "IFW" for m in range(microbatches) for stage in stages]
        for stages in (placement.stages_of(rank)[::-1] for rank in range(pp))
    ]

    def ready(action: Action, held: int) -> bool:
        if action.kind == "F" and action.stage < pp and held > 2 * pp - 2:  # enough under way
            return False
        before = action._replace(kind="I" if action.kind == "W" else "F")
        return {before, source_of(action, placement.count - 1)} - {None, action} <= done

    while any(waiting):
        for table, left in zip(tables, waiting, strict=True):
            held = sum({"F": 1, "I": 0, "W": -1}[action.kind] for action in table)
            table += [action for action in left if ready(action, held)][:1]
        done.update(table[-1] for table in tables if table)
        waiting = [[action for action in left if action not in done] for left in waiting]
    return tables


SCHEDULES["greedy-v"] = greedy_v
