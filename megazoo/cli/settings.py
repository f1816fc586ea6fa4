"""Resolve the settings and the initial weights of one start of the training program."""

from pathlib import Path

from megazoo.checkpoint.foreign import what_is
from megazoo.checkpoint.places import CONFIG, LATEST, TRAINER, has_checkpoint
from megazoo.cli.parsing import CommandLine
from megazoo.environment import restarts
from megazoo.settings import with_settings
from megazoo.terminal import note_rank_0
from megazoo.trainer.adapters import flag_to_go_on, open_weights
from megazoo.trainer.options import (
    Options,
)
from megazoo.trainer.preparation import complete
from megazoo.trainer.run import Settings
from megazoo.trainer.state import resumed_state


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
    weights = open_weights(options)
    resumed = weights.resumed(options)
    state = resumed_state(resumed, type(options))
    origin = str(resumed.path / TRAINER) if resumed else "the checkpoint"
    options = line.options(state["settings"], origin)
    return complete(line.words, options, weights, state, resuming=resumed is not None)


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
