"""A V-shaped schedule, as a user adds it from a file of --import."""

from megazoo.parallel.placement import Placement
from megazoo.parallel.schedule import SCHEDULES, Action, placed


@placed("v")
def v_gpipe(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    """All forwards down the ranks, all up again, then the backwards."""
    stages = Placement("v", pp, virtual).stages_of(rank)
    forwards = [Action("F", stage, m) for stage in stages for m in range(microbatches)]
    return forwards + [Action("B", stage, m) for stage in stages[::-1] for m in range(microbatches)]


SCHEDULES["v-gpipe"] = v_gpipe
