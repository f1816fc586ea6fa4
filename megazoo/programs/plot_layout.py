"""Draw the ranks of a parallel layout: the pipeline stage, the shard and the replica of each rank.

$ megazoo plot layout --tp 2 --pp 4 --dp 2 --output layout.svg

Each column is a pipeline rank, and each row is a replica, or with --cp a part of its sequences. The
boxes of a cell are tensor-parallel ranks. With --ep, the color is the shard of the experts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megazoo.cli.flags import parse_flags
from megazoo.cli.picture import check_picture, import_pyplot, save_picture
from megazoo.errors import UserError
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_RANKS = 1024


@dataclass
class Options:
    """Parallel layout."""

    tp: int = 1
    """Tensor-parallel size: number of ranks that each layer is sharded over."""
    pp: int = 1
    """Pipeline-parallel size: number of ranks that the layers are partitioned over."""
    cp: int = 1
    """Context-parallel size: number of ranks that each sequence is split over."""
    dp: int = 1
    """Data-parallel size: number of replicas."""
    ep: int = 1
    """Expert-parallel size: number of ranks that experts are sharded over, a part of dp x cp."""
    output: Path = Path("layout.png")
    """Output file, .png or .svg."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    check_picture("--output", options.output)
    sizes = [options.tp, options.pp, options.cp, options.dp, options.ep]
    if min(sizes) < 1:
        raise UserError("--tp, --pp, --cp, --dp and --ep must each be at least 1")
    ranks = options.tp * options.pp * options.cp * options.dp
    if ranks > MOST_RANKS:
        raise UserError(f"the layout has {ranks} ranks: at most {MOST_RANKS} can be drawn")
    save_picture(layout_figure(options), options.output)


def layout_figure(options: Options) -> "Figure":
    """Return the map of the ranks of a layout."""
    pyplot = import_pyplot()
    tp, pp, cp, dp = options.tp, options.pp, options.cp, options.dp
    layout = Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=options.ep)
    rows, columns = dp * cp, pp * tp
    size = (1.6 + max(0.7 * columns, 2.4), 1.1 + 0.5 * rows)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    for rank in range(rows * columns):
        ctx = ParallelContext(layout, rank)
        row = ctx.dp_rank * cp + ctx.cp_rank
        column = ctx.pp_rank * tp + ctx.tp_rank + 0.2 * ctx.pp_rank
        shard = ctx.axis("ep").rank if options.ep > 1 else ctx.pp_rank
        color = f"C{shard % 10}"
        axes.barh(row, 0.94, left=column, height=0.86, color=color, alpha=0.35, edgecolor=color)
        axes.text(column + 0.47, row, str(rank), ha="center", va="center")
    stages = [stage * (tp + 0.2) + tp / 2 for stage in range(pp)]
    axes.set_xticks(stages, [f"pp {n}\ntp 0..{tp - 1}" if tp > 1 else f"pp {n}" for n in range(pp)])
    replicas = [f"dp {n // cp}" + (f", cp {n % cp}" if cp > 1 else "") for n in range(rows)]
    axes.set_yticks(range(rows), replicas)
    axes.set(title=_title(options), xlim=(-0.1, stages[-1] + tp / 2 + 0.1))
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _title(options: Options) -> str:
    names = [f"{axis} {getattr(options, axis)}" for axis in ("tp", "pp", "cp", "dp")]
    names += [f"ep {options.ep} (colors)"] * (options.ep > 1)
    return ", ".join(names)
