"""Rules that settings must keep to, checked before anything is built."""

import importlib.util
import math
import os
from dataclasses import fields, replace
from pathlib import Path

from megazoo.cli.options import ModelOptions, Options, groups_of
from megazoo.errors import UserError
from megazoo.models.registry import find_config
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.schedule import check_schedule


def settle_steps(
    options: Options, samples: int | None = None, first_step: int = 0, consumed: int = 0
) -> None:
    """Fill in what follows from the steps, and check it. samples: of an epoch; without, epochs are
    left for later.

    consumed: samples until first_step, where the run goes on, of batches that may have had another
    size.
    """
    training, optimizer = options.training, options.optimizer
    if training.epochs:
        if samples is None:
            return
        training.steps = (
            first_step - (consumed - training.epochs * samples) // training.global_batch_size
        )
    if optimizer.lr_decay_steps is None:
        optimizer.lr_decay_steps = training.steps
    if optimizer.warmup_steps is None:
        optimizer.warmup_steps = min(optimizer.lr_decay_steps // 4, 2000)
    if optimizer.warmup_steps > optimizer.lr_decay_steps:
        what = f"warmup-steps {optimizer.warmup_steps} exceeds the {optimizer.lr_decay_steps} steps of the schedule"
        raise UserError(f"{what}: use less")


def model_config(options: ModelOptions, source=None):
    """The family's config that the options describe; with a source its own, which the options may
    not contradict.

    source: what `open_source` opened, or None. Only the dropout may differ from it.
    """
    given = {f.name: getattr(options, f.name) for f in fields(options)}
    given.pop("import_")
    name, preset, dropout = given.pop("model"), given.pop("preset"), given.pop("dropout")
    sizes = {key: value for key, value in given.items() if value is not None}
    saved = source and source.config
    base = saved if saved and not preset else find_config(preset or name or "gpt2")
    if name and type(find_config(name)) is not type(base):
        what = f"preset {preset}" if preset else f"the checkpoint {source.path}"
        raise UserError(f"{what} is not of the family {name}")
    if "heads" in sizes and getattr(base, "kv_heads", None) == base.heads:
        sizes.setdefault("kv_heads", sizes["heads"])
    if "hidden_size" in sizes and getattr(base, "ffn_size", None) == 4 * base.hidden_size:
        sizes.setdefault("ffn_size", 4 * sizes["hidden_size"])
    unknown = sizes.keys() - {f.name for f in fields(base)}
    if unknown:
        raise UserError(f"{type(base).__name__} has no {min(unknown).replace('_', '-')}")
    rates = [f.name for f in fields(base) if f.name.endswith("dropout")]
    config = replace(
        base, **sizes, **(dict.fromkeys(rates, dropout) if dropout is not None else {})
    )
    for f in fields(config) if saved else ():
        if f.name not in rates and getattr(config, f.name) != getattr(saved, f.name):
            ours, theirs = getattr(config, f.name), getattr(saved, f.name)
            raise UserError(f"{f.name} is {ours}, but {theirs} in the checkpoint {source.path}")
    return config


def check_run(options: Options, model, config, tokenizer, dp: int) -> None:
    """Raise UserError if the run can't be: sizes that don't divide or don't fit, with what would.

    model: the family's class. dp: the data-parallel size.
    """
    training, parallel = options.training, options.parallel
    model.check(config, parallel.tp, parallel.pp, parallel.virtual_pp)
    check_schedule(parallel.schedule, parallel.pp, parallel.virtual_pp)
    how = {
        "virtual": parallel.virtual_pp,
        "stage_layers": parse_stage_layers(parallel.stage_layers),
    }
    model.all_stages(config, ParallelContext.virtual(parallel.tp, parallel.pp, **how))
    if training.train_only:
        model.on_meta(config, ParallelContext()).train_only(training.train_only)
    unit = training.micro_batch_size * dp
    if training.global_batch_size % unit:
        below, above = (
            training.global_batch_size // unit * unit,
            -(-training.global_batch_size // unit) * unit,
        )
        raise UserError(
            f"global-batch-size {training.global_batch_size} is not a multiple of micro-batch-size "
            f"{training.micro_batch_size} x dp {dp} = {unit}: use {f'{below} or ' if below else ''}{above}"
        )
    if training.seq_length > (longest := model.longest_sequence(config)):
        what = f"seq-length {training.seq_length} exceeds the model's max-positions {config.max_positions}"
        if longest > config.max_positions:
            what += f", which its rotary scaling takes to {longest}"
        raise UserError(f"{what}: use at most that, or a larger --max-positions")
    if config.vocab_size < tokenizer.vocab_size and options.data.data != ("mock",):
        what = f"the {tokenizer.vocab_size} of the tokenizer {tokenizer.source}"
        raise UserError(f"vocab-size {config.vocab_size} is smaller than {what}")
    save, metrics, log = options.checkpoint.save, options.logging.metrics, options.logging
    for flag, directory in {
        "--save": save,
        "--tensorboard": log.tensorboard,
        "--profile": log.profile,
    }.items():
        if directory:
            _check_writable(flag, directory)
    for package, wanted in {"tensorboard": log.tensorboard, "wandb": log.wandb}.items():
        found = importlib.util.find_spec(package) if wanted else None
        # a directory of that name is no package
        if wanted and (found is None or found.origin is None):
            raise UserError(
                f"--{package} needs the package {package}: install it, or leave --{package} out"
            )
    if metrics:
        _check_writable("--metrics", metrics.parent)
        if metrics.is_dir():
            raise UserError(f"--metrics {metrics} is a directory")


def parse_stage_layers(text: str) -> str | tuple[int, ...]:
    """What --stage-layers says: balanced, uniform, or numbers."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        return text


def check_steps(options: Options, first_step: int) -> None:
    """Raise UserError if nothing remains to be done after the step of the checkpoint."""
    training = options.training
    if first_step >= training.steps:
        wanted = (
            f"--epochs {training.epochs}, {training.steps} steps,"
            if training.epochs
            else f"--steps {training.steps}"
        )
        raise UserError(
            f"--load {options.checkpoint.load} is at step {first_step} already: {wanted} leaves nothing to do"
        )
    (first, last), left = options.logging.profile_steps, training.steps - first_step
    if options.logging.profile and not 1 <= first <= last <= left:
        raise UserError(f"profile-steps {first} {last} must be two of the run's 1 to {left}")


def _check_writable(flag: str, directory: Path) -> None:
    """Refuse a directory that can't be made or written, before the work that it is for."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"{flag}: {existing} is not a directory")
    if not os.access(existing, os.W_OK):
        raise UserError(f"{flag}: no permission to write in {existing}")


def check_values(options: Options) -> None:
    """Raise UserError for a number that is out of its range."""
    positive = (
        "tp",
        "pp",
        "virtual_pp",
        "steps",
        "epochs",
        "global_batch_size",
        "micro_batch_size",
        "seq_length",
        "log_interval",
    )
    positive += (
        "hidden_size",
        "layers",
        "heads",
        "kv_heads",
        "ffn_size",
        "vocab_size",
        "max_positions",
    )
    positive += ("recompute_interval", "initial_loss_scale", "loss_scale_window", "hysteresis")
    fractions = ("dropout", "beta1", "beta2")
    for group in groups_of(options):
        for f in fields(group):
            value, flag = getattr(group, f.name), f.name.replace("_", "-")
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if f.name in positive and value < 1:
                raise UserError(f"{flag} {value} must be at least 1")
            if not math.isfinite(value) or value < 0:
                raise UserError(f"{flag} {value} must be 0 or more")
            if f.name in fractions and value >= 1:
                raise UserError(f"{flag} {value} must be below 1")
    optimizer = options.optimizer
    if optimizer.min_lr > optimizer.lr:
        raise UserError(f"min-lr {optimizer.min_lr} exceeds lr {optimizer.lr}: give both")
