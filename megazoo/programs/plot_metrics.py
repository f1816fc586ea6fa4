"""Plot the loss curves of one or more metrics files, or the load of experts, as a PNG.

$ megazoo plot metrics runs/gpt2-tiny/metrics.jsonl --output loss.png
$ megazoo plot metrics runs/one/metrics.jsonl runs/tp2/metrics.jsonl --difference
$ megazoo plot metrics runs/experts.jsonl --experts --output experts.png

Needs matplotlib: pip install -e .[plots]
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from megazoo.cli.flags import parse_flags
from megazoo.errors import UserError
from megazoo.files import regular_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSSES = ("loss", "eval_loss", "test_loss")  # each line has one of these


def records_of(path: Path) -> list[dict]:
    """Return the lines of a metrics file. UserError if it can't be read, or a line is not one of
    metrics."""
    records = []
    try:
        lines = regular_file(path, or_pipe=True).read_text().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            _ = record["step"], next(record[key] for key in LOSSES if key in record)
        except (ValueError, KeyError, TypeError, RecursionError, StopIteration) as error:
            raise UserError(f"{path}, line {number} is not a line of metrics") from error
        records.append(record)
    return records


def read_curves(path: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Return the training and validation losses of a metrics file, by step.

    If a step occurs twice (in a resumed or repeated run), the later line is used. UserError if the
    file can't be read, or has no steps.
    """
    training, validation = {}, {}
    for record in records_of(path):
        if "test_loss" in record:  # one number at the end, no curve
            continue
        curve, key = (validation, "eval_loss") if "eval_loss" in record else (training, "loss")
        curve[record["step"]] = record[key]
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
    experts: bool = False
    """Plot the load of each expert instead, one panel per layer: tokens of a step, divided by the
    mean over the experts. Exactly one file is required."""
    output: Path = Path("loss.png")
    """PNG file to write."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    if not options.metrics:
        raise UserError("at least one metrics file is required (see --help)")
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("this needs matplotlib: pip install 'megazoo[plots]'") from error
    matplotlib.use("agg")
    figure = experts_figure(options.metrics) if options.experts else losses_figure(options)
    try:
        figure.savefig(options.output, format="png")
    except OSError as error:
        raise UserError(f"can't write {options.output}: {error.strerror}", exit_code=1) from error
    print(f"drew {options.output}")


def losses_figure(options: Options) -> "Figure":
    """Return the figure of the losses of all files."""
    from matplotlib import pyplot

    curves = [(path, *read_curves(path)) for path in options.metrics]
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
    return figure


def read_loads(path: Path) -> tuple[list[int], dict[str, list[list[int]]]]:
    """Return the steps of a metrics file that have loads of experts, and for each router the tokens
    of each expert in these steps. UserError if there is not one."""
    records = {}
    for record in records_of(path):
        if "expert_tokens" in record:
            records[record["step"]] = record["expert_tokens"]
    if not records:
        raise UserError(f"{path} has no expert_tokens: it is not from a model with experts")
    steps = sorted(records)
    return steps, {name: [records[step][name] for step in steps] for name in records[steps[0]]}


def experts_figure(paths: tuple[Path, ...]) -> "Figure":
    """Return the figure of the load of experts: for each layer, an image with a column per step and
    a row per expert."""
    from matplotlib import pyplot

    if len(paths) > 1:
        raise UserError(f"--experts needs exactly one metrics file, not {len(paths)}")
    steps, loads = read_loads(paths[0])
    figure, panels = pyplot.subplots(
        len(loads), sharex=True, squeeze=False, dpi=120, layout="constrained",
        figsize=(7, 1 + 1.2 * len(loads)),
    )  # fmt: skip
    for (panel,), (name, tokens) in zip(panels, loads.items(), strict=True):
        shares = [[n * len(each) / max(1, sum(each)) for n in each] for each in tokens]
        extent = (steps[0] - 0.5, steps[-1] + 0.5, len(tokens[0]) - 0.5, -0.5)
        image = panel.imshow(
            list(zip(*shares, strict=True)), aspect="auto", vmin=0, vmax=2, extent=extent,
            interpolation="nearest", cmap="RdBu_r",
        )  # fmt: skip
        panel.set(title=name, ylabel="expert")
    panels[-1, 0].set(xlabel="step")
    figure.colorbar(image, ax=panels[:, 0].tolist(), label="tokens / mean")
    return figure
