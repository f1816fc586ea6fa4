"""Plot the loss curves of one or more metrics files as a PNG.

$ megazoo plot metrics runs/gpt2-tiny/metrics.jsonl --output loss.png
$ megazoo plot metrics runs/one/metrics.jsonl runs/tp2/metrics.jsonl --difference

Needs matplotlib: pip install -e .[plots]
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from megazoo.cli.flags import parse_flags
from megazoo.errors import UserError
from megazoo.files import regular_file


def read_curves(path: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Return the training and validation losses of a metrics file, by step.

    If a step occurs twice (in a resumed or repeated run), the later line is used. UserError if the
    file can't be read, or has no steps.
    """
    training, validation = {}, {}
    try:
        lines = regular_file(path, or_pipe=True).read_text().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if "test_loss" in record:  # one number at the end, no curve
                continue
            curve, key = (validation, "eval_loss") if "eval_loss" in record else (training, "loss")
            curve[record["step"]] = record[key]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path}, line {number} is not a line of metrics") from error
    if not training:
        raise UserError(f"{path} has no steps")
    return training, validation


@dataclass
class Options:
    """Loss curves."""

    metrics: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Metrics files that runs wrote with --metrics."""
    difference: bool = False
    """Also plot the difference of each run's training losses from those of the first run."""
    output: Path = Path("loss.png")
    """PNG file to write."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    if not options.metrics:
        raise UserError("at least one metrics file is required (see --help)")
    curves = [(path, *read_curves(path)) for path in options.metrics]
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("this needs matplotlib: pip install 'megazoo[plots]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    size = {"figsize": (7, 5 if options.difference else 4), "dpi": 120, "layout": "constrained"}
    rows, heights = (2, (2, 1)) if options.difference else (1, (1,))
    figure, panels = pyplot.subplots(
        rows, sharex=True, squeeze=False, height_ratios=heights, **size
    )
    axes = panels[0, 0]
    for number, (path, training, validation) in enumerate(curves):
        label = f"{path.parent.name}: " if len(curves) > 1 else ""
        # Curves that are the same remain visible below one another.
        width, alpha = (2 * (len(curves) - number), 1) if options.difference else (1, 0.45)
        (line,) = axes.plot(
            *zip(*sorted(training.items()), strict=True),
            linewidth=width,
            alpha=alpha,
            label=path.parent.name if options.difference else f"{label}training",
        )
        if options.difference and number:
            first = curves[0][1]
            points = [(s, abs(x - first[s])) for s, x in sorted(training.items()) if s in first]
            panels[1, 0].semilogy(*zip(*points, strict=True), color=line.get_color(), linewidth=1)
        if validation and not options.difference:
            points = zip(*sorted(validation.items()), strict=True)
            axes.plot(
                *points,
                "o-",
                color=line.get_color(),
                linewidth=2,
                markersize=6,
                label=f"{label}validation",
            )
    axes.set(ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    if options.difference:
        panels[1, 0].set(ylabel=f"difference from {curves[0][0].parent.name}")
    panels[-1, 0].set(xlabel="step")
    for (panel,) in panels:
        panel.grid(alpha=0.3)
    try:
        figure.savefig(options.output, format="png")
    except OSError as error:
        raise UserError(f"can't write {options.output}: {error.strerror}", exit_code=1) from error
    print(f"drew {options.output}")
