"""Low-rank adapters of a run: their settings in flags and checkpoints, and their base model."""

import os
from pathlib import Path
from typing import NamedTuple

from megazoo import lora
from megazoo.checkpoint.ownership import ADAPTER_CONFIG
from megazoo.checkpoint.places import MANIFEST, find_checkpoint, named_directory
from megazoo.errors import UserError
from megazoo.files import brief
from megazoo.formats.source import HoldsAdapters, ModelSource
from megazoo.lora.settings import LoRASettings
from megazoo.lora.source import SavedAdapters, check_configs, open_model_or_adapters
from megazoo.models.attachment import Attachment
from megazoo.models.base import Model
from megazoo.models.counts import parameter_count, whole_model
from megazoo.models.outputs import CLASSIFIER_HEAD
from megazoo.models.pretrained import open_source
from megazoo.settings import flag_of
from megazoo.trainer.options import LoRAOptions, Options


class Weights(NamedTuple):
    """The initial weights of a run.

    Attributes:
        base: Source of the weights; None if they are initialized from the seed.
        adapters: Checkpoint of a LoRA run.
        settings: Settings of the adapters. None without adapters, and for a PEFT directory, which
            has its own settings.
        base_note: Line to print about a base that only the checkpoint names.
    """

    base: ModelSource | None = None
    adapters: SavedAdapters | None = None
    settings: LoRASettings | None = None
    base_note: str | None = None

    @property
    def described(self) -> ModelSource | None:
        """The source that describes the model."""
        return self.adapters or self.base

    def has_new_head(self, num_labels: int | None) -> bool:
        """Return whether a model with `num_labels` labels gets a head initialized from the seed."""
        return bool(num_labels and not (self.base and self.base.config.num_labels))

    def resumed(self, options: Options) -> ModelSource | None:
        """Return the checkpoint that the run resumes from; None for a new run."""
        if options.checkpoint.load_weights_only:
            return None
        if self.adapters or self.settings or options.lora.lora_load:
            return self.adapters
        if self.has_new_head(options.model.num_labels):  # that is another run
            return None
        return self.base if self.base and self.base.is_of_run else None


NO_WEIGHTS = Weights()


def open_weights(options: Options) -> Weights:
    """Open the sources of --load and --lora-load.

    Raises:
        UserError: The two do not belong together, or flags contradict the checkpoint's adapters.
    """
    load, flags, verify = options.checkpoint.load, options.lora, options.checkpoint.verify
    try:
        base = open_model_or_adapters(load, verify=verify) if load else None
    except UserError as error:
        if not load or os.path.exists(load) or error.exit_code == 1:
            raise
        raise UserError(f"{error}; remove --load to start from random weights") from None
    adapters = None
    if flags.lora_load and isinstance(base, SavedAdapters):
        raise UserError(
            f"--load {load} contains only adapters: pass its base, or --lora-load {load} instead"
        )
    if flags.lora_load:
        adapters = _open_adapters(flags.lora_load, verify)
    elif isinstance(base, SavedAdapters):
        base, adapters = None, base
    _check_flags(flags, adapters)
    if adapters is None:
        return Weights(base, settings=flags.settings)
    note = None
    if base is None and adapters.base_path:
        base, note = open_named_base(adapters, f"--load BASE --lora-load {adapters.path}", verify)
    if base is not None:
        check_configs(base, adapters)
    return Weights(base, adapters, adapters.settings, note)


def _open_adapters(path: Path, verify: bool) -> SavedAdapters | None:
    """Open the checkpoint of --lora-load; None for a PEFT directory."""
    path = named_directory(path)
    if (path / ADAPTER_CONFIG).is_file() and not (path / MANIFEST).is_file():
        return None
    try:
        step = find_checkpoint(path)
    except UserError as error:
        missing = f"{path} is not a directory" if path.exists() else f"no directory {path}"
        missing = f"{error}, nor {ADAPTER_CONFIG}" if path.is_dir() else missing
        raise UserError(f"--lora-load: {missing}") from None
    try:
        return SavedAdapters(step, verify=verify)
    except UserError as error:
        hint = ": use --load for it" if "holds a complete model" in str(error) else ""
        raise UserError(f"--lora-load: {error}{hint}", error.exit_code) from None


def open_named_base(
    adapters: SavedAdapters, otherwise: str, verify: bool
) -> tuple[ModelSource, str]:
    """Open the base that a checkpoint of adapters names; return it with a line about it.

    otherwise: arguments that name another base, for the error. UserError if the base is missing.
    """
    path = adapters.base_path
    assert path, "SavedAdapters without a directory of its base"
    try:
        is_there = named_directory(path).exists()  # also a GGUF file
    except OSError as error:  # for example, the name is too long
        raise UserError(
            f"the base of {adapters.path} can't be read from {brief(str(path))}: {error.strerror}"
        ) from error
    if not is_there:
        raise UserError(f"the base of {adapters.path} is not found at {path}: pass {otherwise}")
    return open_source(path, verify=verify), f"base: {path}, from the checkpoint"


def open_with_base(
    path: Path, adapter: Path | None, verify: bool
) -> tuple[ModelSource, Path | None, str | None]:
    """Open a model to run with adapters or to merge them.

    Returns the model, the path of the adapters, and a line about the base if a checkpoint of
    adapters names it.
    """
    opened = open_model_or_adapters(path, verify=verify)
    if not isinstance(opened, SavedAdapters):
        return opened, adapter, None
    if adapter or opened.base_path is None:
        raise HoldsAdapters(opened.path)
    base, note = open_named_base(opened, f"BASE --adapter {opened.path}", verify)
    return base, opened.path, note


def _check_flags(flags: LoRAOptions, adapters: SavedAdapters | None) -> None:
    """Raise UserError for flags of adapters without adapters, or that contradict the checkpoint."""
    for name, value in flags.given.items():
        flag = flag_of(name)
        if adapters:
            saved = getattr(adapters.settings, name.removeprefix("lora_"))
            if value != saved:
                shown, stored = (
                    ",".join(each) if isinstance(each, tuple) else each for each in (value, saved)
                )
                raise UserError(
                    f"{flag} is {shown}, but {stored} in the checkpoint {adapters.path}: remove "
                    f"{flag}"
                )
        elif flags.lora_load:
            raise UserError(
                f"{flag} {value} cannot be used with --lora-load: {ADAPTER_CONFIG} in "
                f"{flags.lora_load} describes the adapters. Remove {flag}"
            )
        elif not flags.lora_rank and name != "lora_rank":
            raise UserError(
                f"{flag} needs adapters: use --lora-rank R for new ones, or --lora-load DIR"
            )


def check_trained(options: Options, config, weights: Weights) -> None:
    """Raise UserError if --lora-targets or --train-only match nothing in the model, if no adapter
    is trained, or if a new head is not trained (checkpoints of adapters would not include it).

    The matrices that a PEFT directory adapts are checked when it is read.
    """
    pattern = options.training.train_only
    from_peft = options.lora.lora_load and not weights.adapters
    settings = LoRASettings(targets=("all-linear",)) if from_peft else weights.settings
    entries = whole_model(config, pattern, settings).trained_entries()
    is_added = {entry.name: entry.spec.added for entry in entries}  # of what is trained
    if weights.adapters or not settings:
        return
    if not from_peft and not any(is_added.values()):
        raise UserError(
            f"--train-only {pattern} trains no adapter: remove --lora-rank, or use a "
            "pattern that also matches lora"
        )
    if weights.has_new_head(config.num_labels) and CLASSIFIER_HEAD not in is_added:
        raise UserError(
            f"--train-only {pattern} does not train the new head: use a pattern that also "
            "matches score"
        )


def add_adapters(model: Model, options: Options, settings: LoRASettings | None) -> None:
    """Add the adapters of a run to a model, if any: new ones, or those of a PEFT directory.

    The weights must be loaded. Every rank must call it.
    """
    if settings:
        lora.add_by(model, settings)
    elif options.lora.lora_load:
        lora.load(model, options.lora.lora_load)


def note_on_trained(config, settings: Attachment | None, pattern: str | None) -> str | None:
    """Return a line about the trained parameters; None if all are trained."""
    if settings is None and pattern is None:
        return None
    count = parameter_count(config, pattern, settings)
    if settings is None:
        return f"training {count:,} of them: {pattern}"
    assert isinstance(settings, LoRASettings)
    what = f"adapters of {describe(settings)}"
    if pattern:
        what = f"{pattern}, of a model with {what}"
    elif config.num_labels:
        what += ", and the head"
    return f"training {count:,} of them: {what}"


def describe(settings: LoRASettings) -> str:
    """Return a short description of adapters, such as "rank 8 on q, v"."""
    others = sorted({*settings.rank_pattern.values()} - {settings.rank})
    ranks = " or ".join(map(str, [settings.rank, *others]))
    return f"rank {ranks} on {', '.join(settings.targets)}"


def flag_to_go_on(options: Options) -> str:
    """Return the flag that resumes a run from its own checkpoints."""
    return "--lora-load" if options.lora.lora_rank or options.lora.lora_load else "--load"
