"""Plans of runs: memory, FLOPs, traffic and the bubble of every rank, before anything runs."""

from megazoo.planning.plan import Plan, Planner, RankPlan, note_on_mfu
from megazoo.planning.search import FoundLayout, find_layouts

__all__ = ["FoundLayout", "Plan", "Planner", "RankPlan", "find_layouts", "note_on_mfu"]
