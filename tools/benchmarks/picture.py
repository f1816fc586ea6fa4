"""Draw curves with their laws. Requires matplotlib: pip install -e .[plots]"""

from pathlib import Path

from benchmarks.laws import QUANTITIES, UNITS, Curve

from megazoo.errors import UserError


def pyplot():
    """Return matplotlib's pyplot with a file backend. Raises UserError if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("--picture needs matplotlib: pip install -e .[plots]") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw(curves: list[Curve], file: Path) -> None:
    """Write a PNG with a row per curve and a column per quantity. Laws are dashed."""
    shape = len(curves), len(QUANTITIES)
    figure, table = pyplot().subplots(
        *shape, figsize=(10, 2.3 * len(curves)), dpi=90, layout="constrained", squeeze=False
    )
    for curve, row in zip(curves, table, strict=True):
        for quantity, axes in zip(QUANTITIES, row, strict=True):
            if quantity in curve.laws:
                _draw(axes, curve, quantity)
            else:
                axes.axis("off")
    try:
        figure.savefig(file, format="png")
    except OSError as error:
        raise UserError(f"can't write {file}: {error.strerror}", exit_code=1) from error


def _draw(axes, curve: Curve, quantity: str) -> None:
    """Draw a quantity of a curve. Error bars show the range of the runs."""
    law, (sizes, values) = curve.laws[quantity], curve.of(quantity)
    runs = [
        point.seconds if quantity == "time" else [value]
        for point, value in zip(curve.points, values, strict=True)
    ]
    low = [middle - min(each) for middle, each in zip(values, runs, strict=True)]
    high = [max(each) - middle for middle, each in zip(values, runs, strict=True)]
    axes.errorbar(sizes, values, yerr=[low, high], fmt="o-", markersize=4, linewidth=1, capsize=2)
    axes.plot(sizes, list(map(law.fit(sizes, values), sizes)), "--", color="black", linewidth=1)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title(f"{quantity}, {UNITS[quantity]}; law: {law.text}", fontsize=8)
    axes.set_xlabel(curve.name, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
