"""Plot metrics files: loss, learning rate, gradient norm and speed, or the load of experts.

$ megazoo plot metrics runs/gpt2-tiny/metrics.jsonl --output loss.png
$ megazoo plot metrics runs/one/metrics.jsonl runs/tp2/metrics.jsonl --difference
$ megazoo plot metrics runs/experts.jsonl --experts --output experts.png

The pictures need matplotlib: pip install matplotlib
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from megazoo.cli.flags import parse_flags
from megazoo.cli.picture import check_picture, import_pyplot, save_picture
from megazoo.errors import UserError
from megazoo.files import regular_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSSES = ("loss", "eval_loss", "test_loss")  # each line has one of these
CURVES = {
    "loss": "loss (nats per token)",
    "eval_loss": "",  # in the panel of the training loss
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens / s",
}
EXACT = 1e-9  # where a difference of 0 is drawn
ROUNDING = 1e-5  # differences that rounding in fp32 causes are smaller, in nats per token
LARGEST = 10.0

Run = tuple[str, dict[str, dict[int, float]]]  # a label, and the curves of `read_curves`


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
            _ = next(record[key] for key in LOSSES if key in record)
            if not isinstance(record["step"], int):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError, StopIteration) as error:
            raise UserError(f"{path}, line {number} is not a line of metrics") from error
        records.append(record)
    return records


def read_curves(path: Path) -> dict[str, dict[int, float]]:
    """Return the curves of a metrics file: for each metric, its values by step.

    If a step occurs twice (in a resumed or repeated run), the later line is used. Values that are
    not finite numbers are omitted. UserError if the file can't be read, or has no steps.
    """
    curves: dict[str, dict[int, float]] = {name: {} for name in CURVES}
    for record in records_of(path):
        for name in CURVES.keys() & record.keys():
            value = record[name]
            if isinstance(value, int | float) and math.isfinite(value):
                curves[name][record["step"]] = value
    if not curves["loss"]:
        raise UserError(f"{path} has no step with a finite loss")
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def labels_of(paths: Sequence[Path]) -> list[str]:
    """Return a label for each path: the part in which it differs from the others."""
    parts = [Path(str(path).removesuffix(".jsonl")).parts for path in paths]
    shortest = min(map(len, parts))
    first = next((n for n in range(shortest) if len({p[n] for p in parts}) > 1), shortest - 1)
    same = next((n for n in range(shortest) if len({p[-1 - n] for p in parts}) > 1), 0)
    return ["/".join(p[first : max(first + 1, len(p) - same)]) for p in parts]


@dataclass
class Options:
    """Curves of a run."""

    metrics: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Metrics files that runs wrote with --metrics."""
    difference: bool = False
    """Plot only the losses, and the difference of each run's training losses from those of the
    first run, on a fixed logarithmic axis."""
    experts: bool = False
    """Plot the load of each expert instead, one panel per layer: tokens of a step, divided by the
    mean over the experts. Exactly one file is required."""
    output: Path = Path("loss.png")
    """Output file, .png or .svg."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    if not options.metrics:
        raise UserError("at least one metrics file is required (see --help)")
    check_picture("--output", options.output)
    if options.experts:
        figure = experts_figure(options.metrics)
    else:
        curves = map(read_curves, options.metrics)
        runs = list(zip(labels_of(options.metrics), curves, strict=True))
        figure = differences_figure(runs) if options.difference else curves_figure(runs)
    save_picture(figure, options.output)


def curves_figure(runs: list[Run]) -> "Figure":
    """Return the figure of the curves of all runs: a panel for each metric that a run has."""
    pyplot = import_pyplot()

    names = [name for name, title in CURVES.items() if title and any(c[name] for _, c in runs)]
    figure, panels = pyplot.subplots(
        len(names), sharex=True, squeeze=False, layout="constrained",
        figsize=(7, 2.5 + 1.3 * len(names)), height_ratios=[3] + [1] * (len(names) - 1),
    )  # fmt: skip
    for (panel,), name in zip(panels, names, strict=True):
        for number, (label, curves) in enumerate(runs):
            color, before = f"C{number}", f"{label}: " if len(runs) > 1 else ""
            steps, values = list(curves[name]), list(curves[name].values())
            alpha = 0.45 if name == "loss" else 1
            panel.plot(steps, values, lw=1, alpha=alpha, color=color, label=f"{before}training")
            if name == "loss" and (curve := curves["eval_loss"]):
                points = list(curve), list(curve.values())
                panel.plot(*points, "o-", lw=2, color=color, label=f"{before}validation")
        panel.set(ylabel=CURVES[name])
        panel.grid(alpha=0.3)
    panels[0, 0].legend(frameon=False)
    panels[-1, 0].set(xlabel="step")
    return figure


def differences_figure(runs: list[Run]) -> "Figure":
    """Return the figure of the training losses, and of their differences from the first run.

    The axis of the differences is the same for each figure. It starts at 0 and has the band of
    rounding in fp32.
    """
    pyplot = import_pyplot()

    figure, (losses, differences) = pyplot.subplots(
        2, sharex=True, layout="constrained", figsize=(7, 6), height_ratios=(2, 3)
    )
    (_, first), *_ = runs
    for number, (label, curves) in enumerate(runs):
        loss = curves["loss"]
        # Curves that are the same remain visible below one another.
        width = 2 * (len(runs) - number)
        losses.plot(list(loss), list(loss.values()), linewidth=width, label=label)
        if number:
            points = [(s, abs(loss[s] - x)) for s, x in first["loss"].items() if s in loss]
            heights = [min(max(height, EXACT), LARGEST) for _, height in points]
            differences.plot([s for s, _ in points], heights, ".", color=f"C{number}", markersize=4)
    differences.axhspan(EXACT / 2, ROUNDING, color="0.5", alpha=0.15, linewidth=0)
    differences.text(
        0.99, ROUNDING, "rounding in fp32", transform=differences.get_yaxis_transform(),
        ha="right", va="top", color="0.4",
    )  # fmt: skip
    losses.set(ylabel="loss (nats per token)")
    losses.legend(frameon=False)
    differences.set(
        yscale="log", ylim=(EXACT / 2, LARGEST), xlabel="step",
        ylabel=f"|difference| from {runs[0][0]}",
    )  # fmt: skip
    ticks = [10.0**n for n in range(-8, 2)]
    differences.set_yticks([EXACT, *ticks], ["0", *(f"$10^{{{n}}}$" for n in range(-8, 2))])
    differences.minorticks_off()
    for panel in (losses, differences):
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
    pyplot = import_pyplot()

    if len(paths) > 1:
        raise UserError(f"--experts needs exactly one metrics file, not {len(paths)}")
    steps, loads = read_loads(paths[0])
    figure, panels = pyplot.subplots(
        len(loads), sharex=True, squeeze=False, layout="constrained",
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
