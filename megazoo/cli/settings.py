"""Resolve the settings and the initial weights of one start of the training program."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megazoo.checkpoint import Checkpoint
from megazoo.checkpoint.foreign import what_is
from megazoo.checkpoint.places import CONFIG, LATEST, TRAINER, has_checkpoint
from megazoo.cli.adapters import Weights, flag_to_go_on, open_weights
from megazoo.cli.defaults import Defaults, defaults_for, fill_in, of_rows
from megazoo.cli.flags import typed_settings, with_settings
from megazoo.cli.options import (
    DataOptions,
    EvaluationOptions,
    OptimizerOptions,
    Options,
    TrainingOptions,
)
from megazoo.cli.parsing import CommandLine, run_file
from megazoo.cli.rules import check_values, model_config, settle_steps
from megazoo.cli.state import read_state
from megazoo.environment import restarts
from megazoo.errors import UserError
from megazoo.files import brief
from megazoo.terminal import note_rank_0

# The groups of settings that a checkpoint stores. Those of the model and the adapters are in its
# manifest. The layout, the checkpoints and the logging may differ for each start.
KEPT = (TrainingOptions, OptimizerOptions, DataOptions, EvaluationOptions)


@dataclass
class Settings:
    """The settings of one start of the training program.

    arguments: the command line, with what a restart adds to it. options: its settings, over those
    of the TOML file, those of the resumed run, and the defaults. weights: the initial weights.
    resuming: whether a checkpoint's run continues. state: see `resumed_state`. config: the model's.
    unset: names of settings that neither the user nor the resumed run sets. defaults: the defaults
    that depend on the model. filled: the flags that take them. of_rows: names of settings that
    depend on the number of rows, until the data is open.
    """

    arguments: list[str]
    options: Options
    weights: Weights
    resuming: bool
    state: dict
    config: Any
    unset: set[str]
    defaults: Defaults
    filled: list[str]
    of_rows: set[str]


def resolve(arguments: list[str], description: str, kind: type = Options) -> Settings:
    """Read the command line and the TOML file, run the file of --import, open the sources of --load
    and --lora-load, and fill in the defaults. After a restart by torchrun, the last checkpoint is
    opened instead.

    kind: `Options`, or a subclass. Raises UserError as `CommandLine`, `run_file`, `open_weights`,
    `resumed_state` and `model_config`.
    """
    line = CommandLine.read(arguments, description, kind)
    options = line.merged()  # rules between settings are checked with those of the checkpoint
    if not options.checkpoint.load:
        line.options()
    save = options.checkpoint.save
    if restarts() and save and has_checkpoint(save):
        _go_on(line, flag_to_go_on(options))
        options = line.merged()
    if starts_fresh(options):
        note_rank_0(
            f"--load {options.checkpoint.load} has no checkpoint yet: this run is its first"
        )
        line.parsed = with_settings(line.parsed, {"load": None})
        line.file.pop("load", None)
        options = line.merged()
    if options.model.import_:
        run_file(options.model.import_)
    weights = open_weights(options)
    resumed = weights.resumed(options)
    state = resumed_state(resumed)
    origin = str(resumed.path / TRAINER) if resumed else "the checkpoint"
    options = line.options(state["settings"], origin)
    config = model_config(options.model, weights.described)
    unset = {name for name, value in options.values.items() if value is None}
    defaults = defaults_for(options, config, weights)
    later = of_rows(options, defaults)
    filled = fill_in(options, defaults, weights, later)
    check_values(options)
    settle_steps(options, defaults.warmup)
    return Settings(
        line.words,
        options,
        weights,
        resumed is not None,
        state,
        config,
        unset,
        defaults,
        filled,
        later,
    )


def starts_fresh(options: Options) -> bool:
    """Return whether --load and --save name the same directory, and no checkpoint is there yet: so
    the same command starts a run and resumes it."""
    load, save = options.checkpoint.load, options.checkpoint.save
    if not load or not save or options.checkpoint.load_weights_only:
        return False
    path = Path(load)
    if path.resolve() != save.resolve() or path.is_file() or has_checkpoint(path):
        return False
    written = (LATEST, "step_*", ".step_*", CONFIG)  # of a checkpoint that is not complete
    return not path.exists() or not (any(map(any, map(path.glob, written))) or what_is(path))


def _go_on(line: CommandLine, flag: str) -> None:
    """Resume a run from its own last checkpoint, as if this flag ended its command line."""
    keep, name = line.parsed.checkpoint, flag.removeprefix("--").replace("-", "_")
    line.words = [*line.words, flag, str(keep.save), "--no-load-weights-only"]
    line.flags |= {name, "no_load_weights_only"}
    line.parsed = with_settings(line.parsed, {name: keep.save, "load_weights_only": False})


def resumed_state(checkpoint: Checkpoint | None) -> dict:
    """Return the state of a run: its step, samples and tokens consumed, and settings.

    Without a checkpoint, it is the initial state. UserError if the checkpoint is not from a
    training run.
    """
    if checkpoint is None:
        return {"step": 0, "consumed_samples": 0, "consumed_tokens": 0, "settings": {}}
    missing = {"step", "consumed_samples", "consumed_tokens", "settings"} - set(checkpoint.trainer)
    if missing:
        raise UserError(
            f"{checkpoint.path} is not from a training run: trainer.json has no {min(missing)}; "
            "--load-weights-only starts a new run with its weights"
        )
    file = checkpoint.path / TRAINER
    state = read_state(checkpoint.trainer, file)
    _check_kept(state["settings"], file)
    return {**state, "settings": typed_settings(Options, state["settings"], str(file))}


def _check_kept(settings: dict, file: Path) -> None:
    """Raise UserError for settings that no checkpoint stores, above all paths of outputs.

    Unknown settings also raise an error, because omitting one might change the computation.
    `CommandLine` checks the types and ranges of valid settings.
    """
    kept = [f.name for group in KEPT for f in fields(group)]
    for name, value in settings.items():
        if name not in kept:
            name = name if name.isidentifier() else brief(name)
            raise UserError(f"{file}: settings has {name}, which a checkpoint must not contain")
        if name == "tokenizer" and value != "byte":
            raise UserError(
                f"{file}: tokenizer is {brief(value)}: a checkpoint may only name byte, "
                "or contain the files of a tokenizer"
            )


def settings_to_resume(options: Options) -> dict:
    """Return the settings that a checkpoint stores to resume the run: those of the groups in KEPT,
    without layout, logging and checkpoints."""
    groups = (options.training, options.optimizer, options.data, options.evaluation)
    settings = {f.name: getattr(group, f.name) for group in groups for f in fields(group)}
    return {name: value for name, value in settings.items() if value is not None}
