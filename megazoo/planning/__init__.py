"""Plan runs before they start: memory, FLOPs and communication of every rank, and the pipeline
bubble."""

from megazoo.planning.plan import Plan, Planner, RankPlan, note_on_mfu
from megazoo.planning.run import PlannedRun
from megazoo.planning.search import FoundLayout, fastest_layouts, find_layouts, most_layouts
from megazoo.planning.step_time import GPUS

__all__ = [
    "GPUS",
    "FoundLayout",
    "Plan",
    "PlannedRun",
    "Planner",
    "RankPlan",
    "fastest_layouts",
    "find_layouts",
    "most_layouts",
    "note_on_mfu",
]
