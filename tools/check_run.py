"""Run the first steps of a recorded run again, in its own layout or in others, and tell whether the
losses and gradient norms are the same.

$ python pretrain_gpt.py --config configs/gpt2_tiny.toml --record runs/record
$ python tools/check_run.py runs/record
$ python tools/check_run.py runs/record --layouts pp4,dp2 --steps 20
$ python tools/check_run.py runs/record --data path/of/the/data --import mine.py

First compares the files that the run read with their checksums, and names those that have changed.
Then trains on this machine, in processes of its own, and says for each layout how far the steps are
from the recorded ones, or where they part. Exits 1 if a file has changed, or a layout parts.
"""

import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megazoo.cli.flags import Argument, File, Name, optional, parse_flags, typed_settings
from megazoo.cli.launch import run_program
from megazoo.cli.local_ranks import LocalRanks
from megazoo.cli.options import ImportOption
from megazoo.cli.options import Options as TrainingProgram
from megazoo.cli.parsing import required
from megazoo.cli.run_record import (
    BESIDE,
    LAYOUT,
    RECORD,
    Recorded,
    Step,
    changed_files,
    checksums,
    read_record,
    read_steps,
)
from megazoo.data.dataset import check_data
from megazoo.errors import UserError, check_number
from megazoo.files import write_text
from megazoo.testing import Layout
from megazoo.testing.layouts import switches

PROGRAM = Path(__file__).parents[1] / "pretrain_gpt.py"
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}
MOST_NAMED = 10  # files that are named one by one


@dataclass
class Options(ImportOption):
    """What is checked."""

    record: Argument = None
    """Directory of --record."""
    layouts: Annotated[
        optional(str, "NAMES", "the record's own"),
        tyro.conf.arg(
            help="Names with commas between: sizes, as in tp2cp2pp2dp2v2, then what is "
            f"on: {switches()}."
        ),
    ] = None
    steps: int = 10
    """Of the record's first, as many as are run again."""
    data: tuple[str, ...] | None = None
    """Where the data is now, as --data of the training program names it."""
    tokenizer: Name = None
    """Where the tokenizer is now."""
    load: File = None
    """Where the weights are now that the run began with."""
    tolerance: optional(float, "FLOAT", "1e-5; in half precision 0.02") = None
    """Relative difference of a loss above which a layout parts; of a gradient norm, which rounding
    moves more, ten times as much."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    (directory,) = required(options, "record")
    check_number("steps", options.steps, 1, whole=True)
    recorded, steps = read_record(directory), read_steps(directory)
    settings = settings_of(recorded, options, str(directory / RECORD))
    trained = [step for step in steps if step.loss is not None][: options.steps]
    if not trained:
        raise UserError(f"{directory} has no steps: the run ended before its first")
    tolerance = TOLERANCES[settings["dtype"]] if options.tolerance is None else options.tolerance
    check_number("tolerance", tolerance, 0)
    own, layouts = own_layout(recorded, settings), [None]
    if options.layouts:
        layouts = [Layout.named(name) for name in options.layouts.split(",")]
    for layout in layouts:
        if layout is not None:
            check_layout(layout, own, recorded)
    check_files(recorded, settings, options)
    parted = 0
    for number, layout in enumerate(layouts):
        print(f"training {len(trained)} steps at {layout or own} ...", flush=True)
        run, again = train_again(layout, recorded, settings, len(trained), options.import_)
        if number == 0:
            tell_differences(recorded, run)
        line, is_same = compared(trained, again, tolerance)
        print(f"{layout or own!s:16}{line}", flush=True)
        parted += not is_same
    if parted:
        raise UserError(f"{parted} of {len(layouts)} layouts part from the record", exit_code=1)


def settings_of(recorded: Recorded, options: Options, origin: str) -> dict:
    """Return the settings of the recorded run, with what has moved since; UserError for those that
    no record has."""
    for name in recorded.settings.keys() & set(BESIDE):
        raise UserError(f"{origin}: settings has {name}, which decides nothing that is computed")
    settings = typed_settings(TrainingProgram, recorded.settings, origin)
    for name in ("dtype", "steps", "global_batch_size", "micro_batch_size", "tp", "pp", "cp"):
        if not settings.get(name):
            raise UserError(f"{origin}: settings lacks {name}")
    moved = {"tokenizer": options.tokenizer, "load": options.load}
    if options.data:
        moved["data"] = options.data
    settings |= {name: value for name, value in moved.items() if value is not None}
    if recorded.inputs.get("import") and not options.import_:
        raise UserError(
            f"the run imported {recorded.inputs['import'][0]}: give it, or your copy of it, "
            "by --import"
        )
    return settings


def own_layout(recorded: Recorded, settings: dict) -> Layout:
    """Return the layout of the recorded run, as far as a layout's name tells it."""
    sizes = {name: settings[name] for name in ("tp", "pp", "cp")}
    more = {name: settings[name] for name in ("cp_method", "zero", "schedule") if name in settings}
    return Layout(
        **sizes,
        **more,
        dp=recorded.dp,
        virtual=settings.get("virtual_pp", 1),
        sequence_parallel=bool(settings.get("sequence_parallel")),
    )


def check_layout(layout: Layout, own: Layout, recorded: Recorded) -> None:
    """Raise UserError if losses of another layout say nothing: dropout draws by tp, cp, dp and the
    micro-batch."""
    drops = [rate for name, rate in recorded.config.items() if name.endswith("dropout")]
    drops.append(recorded.settings.get("lora_dropout", 0.0))
    drawn_by = ("tp", "cp", "dp", "sequence_parallel")
    differs = any(getattr(layout, name) != getattr(own, name) for name in drawn_by)
    if any(drops) and differs:
        raise UserError(
            f"{layout}: the run has dropout, whose masks follow from tp, cp and dp: only its own "
            f"layout, {own}, and another pp tell anything"
        )


def check_files(recorded: Recorded, settings: dict, options: Options) -> None:
    """Compare the files that the run read with those that are there. UserError if some have
    changed, whose names are printed."""
    inputs = {kind: recorded.inputs.get(kind, []) for kind in ("data", "tokenizer", "weights")}
    if "data" in settings:
        inputs["data"] = list(check_data(tuple(settings["data"]), settings["split"]).names)
    if options.tokenizer:
        inputs["tokenizer"] = [options.tokenizer]
    if options.load:
        inputs["weights"][:1] = [str(options.load)]
    inputs["import"] = [str(options.import_)] if options.import_ else []
    changes = changed_files(recorded.files, checksums(inputs))
    for change in changes[:MOST_NAMED]:
        print(change, flush=True)
    if changes:
        more = len(changes) - MOST_NAMED
        raise UserError(
            f"{len(changes)} of the files that the run read are not as they were"
            + (f", {more} more than are named" if more > 0 else ""),
            exit_code=1,
        )
    print(f"{len(recorded.files):,} files are as they were", flush=True)


def train_again(
    layout: Layout | None, recorded: Recorded, settings: dict, steps: int, import_: Path | None
) -> tuple[Recorded, list[Step]]:
    """Train the first steps again in a layout, None for the record's own; return the record of
    that."""
    settings = {**settings, "steps": recorded.first_step + steps}
    dp = recorded.dp
    if layout is not None:
        for name in LAYOUT:
            settings.pop(name, None)
        for name in ("tp", "pp", "cp", "cp_method", "zero", "schedule", "sequence_parallel"):
            settings[name] = getattr(layout, name)
        settings["virtual_pp"], dp = layout.virtual, layout.dp
        rows = settings["global_batch_size"] // dp
        settings["micro_batch_size"] = math.gcd(settings["micro_batch_size"], rows)
    quiet = {"eval_steps": 0, "log_interval": steps}
    with tempfile.TemporaryDirectory(prefix="megazoo-check-") as directory:
        config, record = Path(directory) / "settings.toml", Path(directory) / "record"
        lines = [f"{name} = {json.dumps(value, default=str)}" for name, value in settings.items()]
        lines += [f"{name} = {value}" for name, value in quiet.items()]
        write_text("--config", config, "\n".join(lines) + "\n")
        command = [sys.executable, "-u", str(PROGRAM), "--config", str(config)]
        command += ["--record", str(record)]
        command += ["--import", str(import_)] if import_ else []
        sizes = {name: settings[name] for name in ("tp", "pp", "cp")}
        code = LocalRanks(**sizes, dp=dp, command=command, output=subprocess.DEVNULL).run()
        if code > 128:
            raise UserError("stopped by a signal", exit_code=code)
        if code:
            raise UserError("the run could not be repeated: see above", exit_code=code)
        steps_again = [step for step in read_steps(record) if step.loss is not None]
        return read_record(record), steps_again


def tell_differences(then: Recorded, now: Recorded) -> None:
    """Say which versions and which parts of the machine are others than the recorded run's."""
    for what in ("versions", "machine"):
        old, new = getattr(then, what), getattr(now, what)
        for name in sorted(old.keys() & new.keys()):
            if old[name] != new[name]:
                print(f"{name}: {old[name][:60]} then, {new[name][:60]} now", flush=True)
    if then.config != now.config:
        print("the model's config is not the same", flush=True)


def compared(then: list[Step], now: list[Step], tolerance: float) -> tuple[str, bool]:
    """Say how far steps are from the recorded ones, or where they part; and whether they don't."""
    if [step.step for step in now] != [step.step for step in then]:
        return f"{len(now)} steps instead of {len(then)}", False
    worst = {}
    for old, new in zip(then, now, strict=True):
        for what, name, times in (("loss", "loss", 1), ("grad_norm", "gradient norm", 10)):
            ours, theirs = getattr(new, what), getattr(old, what)
            difference = relative(ours, theirs)
            if not difference <= times * tolerance:
                parts = f"{name} {ours} instead of {theirs} ({difference:.1e})"
                return f"parts at step {old.step}: {parts}", False
            worst[name] = max(worst.get(name, (0.0, 0)), (difference, old.step))
    if not any(difference for difference, _ in worst.values()):
        return f"{len(then)} steps are the same to the bit", True
    told = [f"{name} {far:.1e} (step {step})" for name, (far, step) in worst.items()]
    return f"{len(then)} steps are the same: {', '.join(told)} apart", True


def relative(ours: float | None, theirs: float | None) -> float:
    """Return how far a number is from the recorded one; None is of a skipped step."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    return abs(ours - theirs) / max(abs(theirs), 1e-30)


if __name__ == "__main__":
    run_program(main)
