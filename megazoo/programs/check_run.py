"""Repeat the first steps of a recorded run, in the same or other parallel layouts, and compare the
losses and gradient norms.

$ megazoo pretrain --config configs/gpt2_tiny.toml --record runs/record
$ megazoo check run runs/record
$ megazoo check run runs/record --layouts pp4,dp2 --steps 20
$ megazoo check run runs/record --data path/of/the/data --import mine.py

First it compares the input files of the run with their checksums, and names those that have
changed. Then it trains on this machine in new processes. For each layout it prints the largest
differences from the recorded steps, or the first step that differs by more than the tolerance.
Exits 1 if a file has changed or a layout differs.
"""

import json
import math
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from megazoo.checkpoint.places import find_checkpoint, has_checkpoint
from megazoo.cli.flags import parse_flags
from megazoo.cli.options import ImportOption
from megazoo.cli.parsing import required
from megazoo.cli.starting import start_again
from megazoo.data.dataset import check_data
from megazoo.errors import UserError, check_number
from megazoo.files import write_text
from megazoo.launching.local_ranks import LocalRanks
from megazoo.parallel.layout import switches
from megazoo.settings import (
    File,
    Name,
    check_value,
    described,
    mandatory,
    typed_settings,
    unset,
    with_settings,
)
from megazoo.testing import Layout
from megazoo.testing.layouts import check_model
from megazoo.trainer.adapters import Weights, open_weights
from megazoo.trainer.options import Options as TrainingProgram
from megazoo.trainer.options import ParallelOptions, layout_settings, with_registered
from megazoo.trainer.record import (
    RECORD,
    Recorded,
    Step,
    changed_files,
    checksums,
    different,
    directories_of,
    read_record,
    read_steps,
    shown,
)
from megazoo.trainer.rules import model_config

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}
MOST_NAMED = 10  # changed files that are named
MOST_RANKS = 16  # ranks started for a record's own layout, unless there are more cores
REQUIRED = (
    "dtype steps global_batch_size micro_batch_size tp pp cp split tokenizer lr_decay_steps"
).split()


@dataclass
class Options(ImportOption):
    """Record to check."""

    record: Positional[Annotated[Path | None, mandatory("RECORD")]] = None
    """Directory that a run wrote with --record."""
    layouts: Annotated[
        Annotated[str | None, unset("NAMES", "the layout of the record")],
        tyro.conf.arg(
            help="Layouts, separated by commas: sizes such as tp2cp2pp2dp2v2, then any of the "
            f"switches {switches()}."
        ),
    ] = None
    steps: int = 10
    """Number of steps to repeat, from the start of the record."""
    data: Annotated[
        tuple[str, ...] | None,
        tyro.conf.arg(metavar="SOURCE [SOURCE ...]", help_behavior_hint="(default: as recorded)"),
    ] = None
    """Location of the training data, if it has changed, in the format of --data of the training
    program."""
    tokenizer: Name = None
    """Location of the tokenizer, if it has changed."""
    load: File = None
    """Location of the weights that the run read with --load, if it has changed."""
    lora_load: File = None
    """Location of the adapters that the run read with --lora-load, if it has changed."""
    tolerance: Annotated[float | None, unset("FLOAT", "1e-5; in half precision 0.02")] = None
    """Largest relative difference of a loss that passes. For a gradient norm, which is more
    sensitive to rounding, ten times this value passes."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    (directory,) = required(options, "record")
    check_number("steps", options.steps, 1, whole=True)
    recorded, steps = read_record(directory), read_steps(directory)
    settings = settings_of(recorded, options, str(directory / RECORD))
    trained = steps_to_train(directory, recorded, steps)[: options.steps]
    tolerance = TOLERANCES[settings["dtype"]] if options.tolerance is None else options.tolerance
    check_number("tolerance", tolerance, 0)
    own, layouts = own_layout(recorded, settings), [None]
    if options.layouts:
        layouts = [Layout.named(name) for name in options.layouts.split(",")]
    program = with_settings(with_registered(TrainingProgram)(), settings)
    weights = open_weights(program)
    for layout in layouts:
        check_layout(layout, own, recorded, model_config(program.model, weights.described))
    check_files(recorded, settings, weights, options.import_)
    set_threads(recorded)
    parted = 0
    for number, layout in enumerate(layouts):
        print(f"training {len(trained)} steps at {layout or own} ...", flush=True)
        run, again = train_again(layout, recorded, settings, len(trained), options.import_)
        if number == 0:
            tell_differences(recorded, run, is_own=layout is None)
        line, is_same = compared(trained, again, tolerance)
        print(f"{layout or own!s:15} {line}", flush=True)
        parted += not is_same
    if parted:
        raise UserError(f"{parted} of {len(layouts)} layouts differ from the record", exit_code=1)


def settings_of(recorded: Recorded, options: Options, origin: str) -> dict:
    """Return the settings of the recorded run, with the new locations of moved files.

    Raises UserError for settings that no valid record has.
    """
    kind = with_registered(TrainingProgram)
    declared = described(kind)
    for name in recorded.settings.keys() & declared.keys():
        if not declared[name].result:
            raise UserError(f"{origin}: settings has {name}, which does not affect the computation")
    settings = typed_settings(kind, recorded.settings, origin)
    for name, value in settings.items():
        check_value(declared[name], name, value, origin)
    for name in REQUIRED:
        if not settings.get(name):
            raise UserError(f"{origin}: settings lacks {name}")
    begins_with = settings.get("load") or settings.get("lora_load")
    if recorded.first_step and not begins_with:
        raise UserError(
            f"{origin}: first_step is {recorded.first_step}, but settings lacks load and lora_load"
        )
    if recorded.inputs.get("import") and not options.import_:
        raise UserError(
            f"the run imported {shown(recorded.inputs['import'][0])}: pass that file, or a copy, "
            "with --import"
        )
    settings |= moved_directories(settings, options)
    if options.data:
        settings["data"] = options.data
    if options.tokenizer:
        settings["tokenizer"] = options.tokenizer
    return settings


def moved_directories(settings: dict, options: Options) -> dict:
    """Return the locations of the weights, and of the tokenizer if it was stored with them.

    Raises UserError if they do not exist.
    """
    moved: dict[str, str | Path] = {}
    for name, flag in (("load", "--load"), ("lora_load", "--lora-load")):
        old, new = settings.get(name), getattr(options, name)
        if new and not old:
            raise UserError(f"{flag} {new}: the recorded run had no {flag}: omit it")
        if not old:
            continue
        if new and has_checkpoint(new):  # a record names the step
            new = find_checkpoint(new)
        tokenizer = Path(settings.get("tokenizer", "byte"))
        if new and tokenizer.is_relative_to(old):
            moved["tokenizer"] = str(new / tokenizer.relative_to(old))
        moved[name] = directory = new or old
        if not directory.is_dir():
            raise UserError(
                f"the weights were in {shown(str(directory))}, which is not a directory: pass "
                f"their new location with {flag}"
            )
    return moved


def steps_to_train(directory: Path, recorded: Recorded, steps: list[Step]) -> list[Step]:
    """Return the recorded steps that can be repeated: the first ones without a gap, up to a resume
    that changed the run. UserError if there are none."""
    found = [step for step in steps if step.loss is not None]
    numbers = range(recorded.first_step + 1, recorded.first_step + 1 + len(found))
    found = [step for step, number in zip(found, numbers, strict=True) if step.step == number]
    if not found:
        raise UserError(f"{directory} has no steps: the run ended before its first")
    for start in recorded.resumed:
        if start.changes:
            print(f"after step {start.step} the run resumed with changes, and is not compared:")
            print("\n".join(f"  {shown(change)}" for change in start.changes[:MOST_NAMED]))
            return [step for step in found if step.step <= start.step]
    return found


def own_layout(recorded: Recorded, settings: dict) -> Layout:
    """Return the layout of the recorded run, as far as the name of a layout describes it."""
    names = set(layout_settings()) - {"stage_layers"}
    found = {name: settings[name] for name in names if name in settings}
    return Layout(**found, dp=recorded.dp).settled("cpu")


def check_layout(layout: Layout | None, own: Layout, recorded: Recorded, config) -> None:
    """Raise UserError if the model can't be trained in a layout, or its losses can't be compared.

    layout: None for the record's own layout, `own`.
    """
    most, rows = max(MOST_RANKS, os.cpu_count() or 1), recorded.settings["global_batch_size"]
    if layout is None and own.ranks > most:
        raise UserError(
            f"the layout of the record, {own}, has {own.ranks:,} ranks, but at most {most} are "
            "started on this machine by default: pass it, or a smaller layout, with --layouts"
        )
    if layout is None:
        return
    check_model(layout, config)
    if rows % layout.dp:
        raise UserError(f"{layout}: the global batch of {rows} is not a multiple of dp {layout.dp}")
    check_dropout(layout, own, recorded)


def check_dropout(layout: Layout, own: Layout, recorded: Recorded) -> None:
    """Raise UserError if dropout makes the losses of another layout differ: its masks depend on tp,
    cp, dp and the micro-batch."""
    drops = [rate for name, rate in recorded.config.items() if name.endswith("dropout")]
    drops.append(recorded.settings.get("lora_dropout", 0.0))
    drawn_by = ("tp", "cp", "dp", "sequence_parallel")
    differs = any(getattr(layout, name) != getattr(own, name) for name in drawn_by)
    if any(drops) and differs:
        raise UserError(
            f"{layout}: the run used dropout, whose masks depend on tp, cp and dp: use its own "
            f"layout, {own}, or change only pp"
        )


def check_files(recorded: Recorded, settings: dict, weights: Weights, import_: Path | None) -> None:
    """Compare the input files of the run with their checksums. UserError if some have changed;
    their names are printed."""
    data = settings.get("data", ("mock",))
    inputs = {
        "data": list(check_data(tuple(data), settings["split"]).names),
        "tokenizer": [settings["tokenizer"]],
        "weights": [
            *directories_of(weights, settings.get("lora_load")),
            *map(str, filter(None, [settings.get("reference")])),
        ],
        "import": [str(import_)] if import_ else [],
    }
    changes = changed_files(recorded.files, checksums(inputs))
    for change in changes[:MOST_NAMED]:
        print(change, flush=True)
    if changes:
        more = len(changes) - MOST_NAMED
        raise UserError(
            f"{len(changes)} input files of the run have changed"
            + (f", {more} more than are named" if more > 0 else ""),
            exit_code=1,
        )
    print(f"{len(recorded.files):,} files are unchanged", flush=True)


def set_threads(recorded: Recorded) -> None:
    """Use as many threads as the recorded run had for a single rank, if there are enough cores: the
    number of threads changes the rounding of sums."""
    threads = recorded.machine.get("threads", "")
    if re.fullmatch("[1-9][0-9]{0,3}", threads) and int(threads) <= (os.cpu_count() or 1):
        os.environ["OMP_NUM_THREADS"] = threads


def train_again(
    layout: Layout | None, recorded: Recorded, settings: dict, steps: int, import_: Path | None
) -> tuple[Recorded, list[Step]]:
    """Repeat the first steps in a layout, None for the record's own; return the new record and its
    steps."""
    settings = {**settings, "steps": recorded.first_step + steps}
    dp = recorded.dp
    if layout is not None:
        for name in described(ParallelOptions):
            settings.pop(name, None)
        named = set(layout_settings()) - {"stage_layers"}
        settings |= {name: getattr(layout, name) for name in named}
        dp = layout.dp
        rows = settings["global_batch_size"] // dp
        ramp = [size // dp for size in settings.get("rampup_batch_size", ())[:2]]
        settings["micro_batch_size"] = math.gcd(settings["micro_batch_size"], rows, *ramp)
    quiet = {"eval_steps": 0, "log_interval": steps}
    with tempfile.TemporaryDirectory(prefix="megazoo-check-") as directory:
        config, record = Path(directory) / "settings.toml", Path(directory) / "record"
        lines = [f"{name} = {toml(value)}\n" for name, value in {**settings, **quiet}.items()]
        write_text("--config", config, "".join(lines))
        words = ["-m", "megazoo.pretrain", "--config", str(config), "--record", str(record)]
        words += ["--import", str(import_)] if import_ else []
        sizes = {name: settings[name] for name in ("tp", "pp", "cp")}
        run_ranks(Layout(**sizes, dp=dp), words)
        steps_again = [step for step in read_steps(record) if step.loss is not None]
        return read_record(record), steps_again


def run_ranks(layout: Layout, words: list[str]) -> None:
    """Run ranks of Python with these arguments, without their output. A signal that ends them also
    ends this program; UserError if they fail."""

    def work() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        start_again(words)

    ranks = LocalRanks(layout, work)
    code = ranks.run()
    if ranks.received is not None:
        sys.exit(128 + ranks.received)
    if code:
        raise UserError("the run could not be repeated: see the error above", exit_code=code)


def toml(value) -> str:
    """Return a setting in the format of --config."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return "".join(c if " " <= c <= "~" else f"\\U{ord(c):08x}" for c in text)


def tell_differences(then: Recorded, now: Recorded, *, is_own: bool) -> None:
    """Print the versions, properties of the machine and config values that differ from the record.

    is_own: whether the layout is that of the record; in another layout threads are not compared.
    """
    if not is_own:
        now.machine.pop("threads", None)
    for what in ("versions", "machine", "config"):
        for line in different(what.removesuffix("s"), getattr(then, what), getattr(now, what)):
            print(shown(line), flush=True)


def compared(then: list[Step], now: list[Step], tolerance: float) -> tuple[str, bool]:
    """Return a line on the differences between two lists of steps, and whether they match."""
    if [step.step for step in now] != [step.step for step in then]:
        return f"{len(now)} steps instead of {len(then)}", False
    worst = {}
    for old, new in zip(then, now, strict=True):
        for what, name, times in (("loss", "loss", 1), ("grad_norm", "gradient norm", 10)):
            value, recorded = getattr(new, what), getattr(old, what)
            difference = relative(value, recorded)
            if not difference <= times * tolerance:
                found = f"{name} {value} instead of {recorded} ({difference:.1e})"
                return f"differs at step {old.step}: {found}", False
            worst[name] = max(worst.get(name, (0.0, 0)), (difference, old.step))
    if not any(difference for difference, _ in worst.values()):
        return f"{len(then)} steps are bitwise identical", True
    far = [f"{name} {value:.1e} (step {step})" for name, (value, step) in worst.items()]
    return f"{len(then)} steps match, largest differences: {', '.join(far)}", True


def relative(value: float | None, recorded: float | None) -> float:
    """Return the relative difference from a recorded value; None stands for a skipped step."""
    if value is None or recorded is None:
        return 0.0 if value is recorded else math.inf
    return abs(value - recorded) / max(abs(recorded), 1e-30)
