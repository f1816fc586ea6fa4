"""Draw a pipeline schedule: the actions of each rank over time, and their dependencies.

$ megazoo plot schedule --schedule zb-h1 --pp 4 --microbatches 8 --output schedule.svg

Each row is a rank. Each box is an action of one micro-batch: forward (F), backward (B), or the two
halves of the backward pass, for the inputs (I) and for the weights (W). Boxes of later interleaved
stages are darker. An arrow points from the action that computed an input to the action that waited
for it. Transfers between ranks take no time in the drawing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megazoo.cli.flags import parse_flags
from megazoo.cli.options import ImportOption
from megazoo.cli.picture import check_picture, import_pyplot, save_picture
from megazoo.errors import UserError
from megazoo.parallel.layout import Layout
from megazoo.parallel.placement import Placement
from megazoo.parallel.schedule import (
    COST,
    Action,
    Span,
    schedule_named,
    source_of,
    tables_of,
    timeline,
)
from megazoo.trainer.options import ScheduleName
from megazoo.user_files import run_file

MOST_BOXES = 10_000  # boxes that are drawn in a minute
LONGEST = 1e12  # largest cost of an action
COLORS = {"F": "#7fb3e6", "B": "#8fce8f", "I": "#8fce8f", "W": "#f2c879"}


@dataclass
class Options(ImportOption):
    """Schedule, and cost of its actions."""

    schedule: ScheduleName = "1f1b"
    """Pipeline schedule: one of these, or one that --import registers."""
    pp: int = 4
    """Pipeline-parallel size: number of ranks."""
    virtual_pp: int = 1
    """Number of stages per rank."""
    microbatches: int = 8
    """Number of micro-batches per replica and step."""
    cost: Annotated[tuple[float, ...], tyro.conf.arg(metavar="F I W")] = (1.0, 1.0, 1.0)
    """Time of a forward, of a backward for the inputs, and of a backward for the weights. B costs
    the sum of the last two."""
    output: Path = Path("schedule.png")
    """Output file, .png or .svg."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    if options.import_:
        run_file(options.import_)
    check(options)
    pyplot = import_pyplot()
    forward, inputs, weights = options.cost
    cost = COST | {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}
    schedule = schedule_named(options.schedule)
    layout = Layout(pp=options.pp, virtual_pp=options.virtual_pp, schedule=options.schedule)
    placement = layout.placement
    tables = tables_of(schedule, layout.pp, layout.virtual_pp, options.microbatches)
    spans = timeline(tables, cost)
    end = max(span.end for span in spans.values())
    busy = sum(span.end - span.start for span in spans.values()) / options.pp
    figure, axes = pyplot.subplots(figsize=(min(40.0, 2 + end * 0.35), 1 + 0.6 * options.pp))
    for rank, table in enumerate(tables):
        draw_rank(axes, rank, table, spans, placement)
    axes.set(
        yticks=range(options.pp),
        yticklabels=[f"rank {rank}" for rank in range(options.pp)],
        xlabel="time",
        xlim=(0, end),
    )
    name = f"{options.schedule}, virtual-pp {layout.virtual_pp}"
    axes.set_title(f"{name}: bubble {end / busy - 1:.1%} of the work")
    axes.invert_yaxis()
    figure.tight_layout()
    save_picture(figure, options.output)


def check(options: Options) -> None:
    """Raise UserError for invalid options."""
    if min(options.pp, options.virtual_pp, options.microbatches) < 1:
        raise UserError("--pp, --virtual-pp and --microbatches must each be at least 1")
    if options.virtual_pp > 1 and options.pp == 1:
        raise UserError("--virtual-pp above 1 needs a pipeline: use --pp 2 or more")
    layout = Layout(pp=options.pp, virtual_pp=options.virtual_pp, schedule=options.schedule)
    boxes = 2 * layout.placement.count * options.microbatches
    if boxes > MOST_BOXES:
        raise UserError(
            f"--pp {options.pp}, --virtual-pp {layout.virtual_pp} and --microbatches "
            f"{options.microbatches} make {boxes} boxes: at most {MOST_BOXES} can be drawn"
        )
    if len(options.cost) != 3 or not all(0 < cost <= LONGEST for cost in options.cost):
        raise UserError("--cost must be three numbers above 0: the times of F, I and W")
    check_picture("--output", options.output)


def draw_rank(
    axes, rank: int, table: list[Action], spans: dict[Action, Span], placement: Placement
) -> None:
    """Draw the actions of a rank as a row of boxes, and an arrow to each action that waited."""
    free = 0.0  # since when the rank has been idle
    for action in table:
        span = spans[action]
        axes.barh(
            rank,
            span.end - span.start,
            left=span.start,
            color=color_of(action, placement),
            edgecolor="white",
            height=0.9,
        )
        axes.text(
            (span.start + span.end) / 2,
            rank,
            f"{action.kind}{action.microbatch}",
            ha="center",
            va="center",
            fontsize=7,
        )
        source = source_of(action, placement.count - 1)
        if source and span.start > free:
            axes.annotate(
                "",
                (span.start, rank),
                (span.start, placement.rank_of(source.stage)),
                arrowprops={"arrowstyle": "->", "color": "#555555", "lw": 0.8},
            )
        free = span.end


def color_of(action: Action, placement: Placement) -> list[float]:
    """Return the color of the kind of an action, darker for each later stage of its rank."""
    from matplotlib.colors import to_rgb

    stages = placement.stages_of(placement.rank_of(action.stage))
    shade = 1 - 0.5 * stages.index(action.stage) / placement.virtual
    return [part * shade for part in to_rgb(COLORS[action.kind])]
