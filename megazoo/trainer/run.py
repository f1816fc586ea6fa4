"""A run before its ranks start: its checked settings, and the step at which it resumes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megazoo.data.dataset import Sources
from megazoo.data.labels import Labels
from megazoo.environment import restarts, world_size
from megazoo.formats.source import ModelSource
from megazoo.losses import Loss
from megazoo.optim.learning_rate import LRSchedule, lr_schedule
from megazoo.parallel.agreement import Terms
from megazoo.parallel.device import choose_device
from megazoo.settings import described, flag_of
from megazoo.tokenizer import Tokenizer
from megazoo.trainer.adapters import Weights
from megazoo.trainer.batch_sizes import BatchSizes
from megazoo.trainer.defaults import FEW_STEPS, Defaults, fit_to_rows
from megazoo.trainer.loss import loss_of
from megazoo.trainer.options import DataOptions, Options, default_dtype
from megazoo.trainer.record import InputFile
from megazoo.trainer.rules import check_steps, settle_steps


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


@dataclass
class Run(Settings):
    """A run of the training program.

    Attributes:
        tokenizer: Tokenizer of the data.
        sources: Sources of the data.
        labels: Labels of a classifier's data.
        finished: Whether torchrun has restarted the program after the last step.
        dtype_chosen: Whether the dtype is the default of the device.
        fingerprints: Fingerprints of the data, on rank 0.
        reference: Checksum of the model of --reference, once it is loaded.
        files: Checksums of all input files for --record, on rank 0.
    """

    tokenizer: Tokenizer
    sources: Sources
    labels: Labels | None = None
    finished: bool = False
    dtype_chosen: bool = False
    fingerprints: list[dict] = field(default_factory=list)
    reference: str | None = None
    files: list[InputFile] = field(default_factory=list)

    @property
    def source(self) -> ModelSource | None:
        """The source of the weights; None if they are initialized from the seed."""
        return self.weights.base

    @property
    def first_step(self) -> int:
        """The number of steps before this start; 0 for a new run."""
        return self.state["step"]

    @property
    def loss(self) -> Loss | None:
        """The loss; None for the cross-entropy."""
        return loss_of(self.options)

    @property
    def has_pairs(self) -> bool:
        """Whether the rows of the data are pairs of answers."""
        return self.loss is not None and self.loss.rows_together == 2

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batch size of each step."""
        training = self.options.training
        return BatchSizes(training.global_batch_size, training.rampup_batch_size)

    @property
    def batch_starts(self) -> Sequence[int]:
        """The number of samples consumed before each remaining step."""
        steps = self.options.training.steps - self.first_step
        return self.batch_sizes.first(self.state["consumed_samples"], steps)

    def terms(self) -> Terms:
        """Return the model and the settings that must be the same on all ranks.

        Paths are not included: they may differ between machines.
        """
        terms = Terms()
        terms.take(agreed(self.options))
        terms.take_config(self.config)
        return terms

    def settle_epochs(self, samples: int) -> list[str]:
        """Set the settings that depend on the size of the data, such as the number of steps. Return
        lines to print about them. samples: number of samples per epoch."""
        consumed, training, notes = self.state["consumed_samples"], self.options.training, []
        fit_to_rows(self.options, self.of_rows, samples)
        settle_steps(self.options, self.defaults.warmup, samples, self.first_step, consumed)
        self.check_remaining()
        if self.of_rows:
            chosen = (f"{flag_of(name)} {getattr(training, name)}" for name in sorted(self.of_rows))
            notes.append(
                f"defaults for {samples:,} training rows: {', '.join(chosen)}, so "
                f"{training.steps:,} steps"
            )
            self.of_rows = set()
        if not self.resuming and training.steps < FEW_STEPS:
            notes.append(self._warning_on_steps(samples))
        return notes

    def _warning_on_steps(self, samples: int) -> str:
        """Return a warning about a run of few steps, with the settings that give FEW_STEPS."""
        training = self.options.training
        batch, before = training.global_batch_size, FEW_STEPS - 1
        together = self.options.replicas * training.micro_batch_size
        rows = math.ceil(samples * (training.epochs or 1) / before) - 1  # of the largest batch
        advice = f"--epochs {before * batch // samples + 1}"
        if smaller := rows // together * together:
            advice = f"--global-batch-size {smaller} or {advice}"
        return (
            f"warning: {samples:,} rows in batches of {batch} are only {training.steps} "
            f"step{'s' * (training.steps > 1)} (--epochs {training.epochs}): use {advice} for "
            f"{FEW_STEPS} steps"
        )

    def check_remaining(self) -> None:
        """Set `finished` if torchrun has restarted the program after the last step.

        Raises:
            UserError: The user asked for no more steps than the checkpoint has.
        """
        if restarts() and self.first_step >= self.options.training.steps:
            self.finished = True
        else:
            check_steps(self.options, self.first_step)

    def device(self) -> torch.device:
        """Return the device of this rank. Raises UserError if the machine has too few."""
        parallel = self.options.parallel
        to_start = parallel.replica * self.options.replicas
        return choose_device(parallel.device, to_start if world_size() == 1 else None)

    def settle_dtype(self, device: str) -> None:
        """Set the default dtype of a device, "cuda" or "cpu", if the settings have no dtype.

        A resumed run keeps its dtype on any device. It is in its settings; if not, it is float32.
        """
        training = self.options.training
        self.dtype_chosen = training.dtype is None
        if self.dtype_chosen:
            training.dtype = "float32" if self.resuming else default_dtype(device)

    def note_on_precision(self, device: str) -> str:
        """Return the end of a line that describes the dtype; "" for float32 on a CPU."""
        training = self.options.training
        if training.dtype != "float32":
            other = " (--dtype float32 for fp32)" if self.dtype_chosen else ""
            return f", in {training.dtype}{other}"
        if device == "cpu":
            return ""
        rounded = training.fp32_precision == "tf32"
        return ", in float32" + (
            ", multiplied in TF32 (--fp32-precision ieee for fp32)" if rounded else ""
        )

    @property
    def lr_schedule(self) -> LRSchedule:
        """The learning-rate schedule. With Muon, that of Muon, to which the rate of AdamW is
        proportional."""
        optimizer = self.options.optimizer
        lr, min_lr = optimizer.lr, optimizer.min_lr
        if optimizer.optimizer == "muon":
            min_lr = min_lr * optimizer.muon_lr / lr if lr else 0.0
            lr = optimizer.muon_lr
        return lr_schedule(
            optimizer.lr_schedule,
            lr=lr,
            min_lr=min_lr,
            warmup_steps=optimizer.warmup_steps,
            steps=optimizer.lr_decay_steps,
            **optimizer.of_schedule,
        )

    def note_on_decay(self) -> str | None:
        """Return a line if the learning rate was decayed before the first step of a resumed run,
        so that all steps have the final one; None otherwise."""
        if not self.resuming or not self.lr_schedule.is_over(self.first_step):
            return None
        return (
            f"the learning rate stays at --min-lr {self.options.optimizer.min_lr:g}: "
            f"--lr-decay-steps {self.options.training.steps} extends the decay"
        )

    def is_last(self, step: int) -> bool:
        return step == self.options.training.steps

    def evaluates_at(self, step: int) -> bool:
        """Whether an evaluation is due after a step."""
        interval = self.options.evaluation.eval_interval
        return self.is_last(step) or bool(interval and step % interval == 0)

    def validates_at(self, step: int) -> bool:
        """Whether the validation loss is measured after a step."""
        has_data = self.options.evaluation.eval_steps and self.sources.shares[1]
        return bool(has_data and self.evaluates_at(step))

    def tests_at(self, step: int) -> bool:
        """Whether the test loss is measured after a step."""
        return bool(
            self.is_last(step) and self.options.evaluation.eval_steps and self.sources.shares[2]
        )

    def saves_at(self, step: int) -> bool:
        """Whether a regular checkpoint is due after a step."""
        interval = self.options.checkpoint.save_interval
        return self.is_last(step) or bool(interval and step % interval == 0)


def agreed(options: Options) -> dict:
    """Return the settings that must be the same on all ranks, by their flags."""
    settings, values = described(type(options)), options.values.items()
    return {flag_of(name): value for name, value in values if settings[name].agreed}


def notes_on_changes(run: Run) -> list[str]:
    """Return notes on a resumed run: the data that the checkpoint names, and the settings of the
    samples that differ from the checkpoint."""
    before, options, notes = run.state["settings"], run.options, []
    data = options.data.data
    if before.get("data") == data != DataOptions.data:
        notes.append(f"data: {' '.join(data)}, from the checkpoint")
    settings = described(type(options))
    for name, now in options.values.items():
        if settings[name].samples and before.get(name, now) != now:
            what, then = name.replace("_", "-"), said(before[name])
            notes.append(f"{what}: {said(now)}; the checkpoint's run had {then}")
    return notes


def said(value) -> str:
    """Return the value of a setting as it is typed after its flag."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
