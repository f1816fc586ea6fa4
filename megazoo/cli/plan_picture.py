"""The memory of a plan as a picture."""

from typing import TYPE_CHECKING

from megazoo.cli.picture import import_pyplot
from megazoo.cli.text import ranges, size
from megazoo.parallel.sizes import product_of
from megazoo.planning import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("weights", "gradients", "optimizer", "activations")


def memory_figure(plan: Plan, limit: int | None = None) -> "Figure":
    """Return a figure of the memory of each rank at the peak of a step: a stacked bar per group of
    equal ranks.

    limit: memory per device in bytes, drawn as a line. UserError if matplotlib is not installed.
    """
    pyplot = import_pyplot()
    layout, batch = plan.layout, plan.batch
    most = max(limit or 0, *(rank.total for rank in plan.ranks))
    unit, name = (1e9, "GB") if most >= 1e9 else (1e6, "MB")
    figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.34 * len(plan.ranks)), layout="constrained")
    places = range(len(plan.ranks))
    ends = [0.0] * len(plan.ranks)
    for part in PARTS:
        sizes = [getattr(rank, part) / unit for rank in plan.ranks]
        axes.barh(places, sizes, left=ends, label=part)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    for place, end, rank in zip(places, ends, plan.ranks, strict=True):
        axes.annotate(
            size(rank.total), (end, place), (4, 0), textcoords="offset points", va="center"
        )
    if limit:
        axes.axvline(limit / unit, color="0.3", linestyle="--", label=f"limit {size(limit)}")
    axes.set_yticks(places, [f"pp {rank.pp}, tp {ranges(rank.tp)}" for rank in plan.ranks])
    sizes = product_of(layout["tp"], layout["pp"], layout["dp"], layout["cp"])
    settings = f"{batch['dtype']}, recompute {batch['recompute']}"
    axes.set(xlabel=f"{name} per rank", title=f"{plan.model}, {sizes}, {settings}")
    axes.invert_yaxis()
    axes.margins(x=0.15, y=0.02)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
