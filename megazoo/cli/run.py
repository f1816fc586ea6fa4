"""What is known of a run before its ranks start: its settings, checked, and where it goes on."""

from dataclasses import dataclass, field, fields
from pathlib import Path

from megazoo.checkpoint import Checkpoint
from megazoo.checkpoint.places import TRAINER
from megazoo.checkpoint.schema import TrainingState, checked_state
from megazoo.cli.adapters import NO_WEIGHTS, Weights
from megazoo.cli.elastic import is_restart
from megazoo.cli.flags import typed_settings
from megazoo.cli.options import (
    DataOptions,
    EvaluationOptions,
    OptimizerOptions,
    Options,
    TrainingOptions,
    default_dtype,
)
from megazoo.cli.rules import check_steps, settle_steps
from megazoo.cli.run_record import InputFile
from megazoo.data.dataset import Sources
from megazoo.data.labels import Labels
from megazoo.errors import UserError
from megazoo.files import brief
from megazoo.models.source import ModelSource
from megazoo.optim.learning_rate import learning_rate
from megazoo.parallel.agreement import Terms
from megazoo.parallel.context import ParallelContext
from megazoo.tokenizer import Tokenizer

# The groups of settings that a checkpoint keeps. Of the others, the model's and the adapters' are
# in its manifest; the layout, the checkpoints and what is logged are of one start.
KEPT = (TrainingOptions, OptimizerOptions, DataOptions, EvaluationOptions)
# Settings of the samples and their order: a resumed run says which of them have changed.
SAMPLING = "data split seed separate_documents chat_template packing".split()
# The groups of settings that all ranks have alike.
COMPARED = "parallel training lora optimizer evaluation".split()


@dataclass
class Run:
    """A run of the training program.

    arguments: the command line, with what a restart adds to it. config: the model's. sources: of
    the data. source: the model that --load names. resuming: whether the run goes on from there; it
    may take the weights alone. state: see `resumed_state`. finished: whether torchrun has started
    the program again after the last step. dtype_chosen: whether no setting named the dtype.
    fingerprints: of the data, files: checksums of all that is read, for --record; both on rank 0.
    labels: of a classifier's data. weights: `source`, and
    what there is beside it.
    """

    arguments: list[str]
    options: Options
    config: object
    tokenizer: Tokenizer
    sources: Sources
    source: ModelSource | None
    resuming: bool
    state: dict
    finished: bool = False
    dtype_chosen: bool = False
    fingerprints: list[dict] = field(default_factory=list)
    files: list[InputFile] = field(default_factory=list)
    labels: Labels | None = None
    weights: Weights = NO_WEIGHTS

    @property
    def first_step(self) -> int:
        """The step after which this start begins; 0 for a new run."""
        return self.state["step"]

    @property
    def batch_starts(self) -> range:
        """The samples consumed before each of the steps that remain."""
        rows = self.options.training.global_batch_size
        first = self.state["consumed_samples"]
        return range(first, first + (self.options.training.steps - self.first_step) * rows, rows)

    def terms(self) -> Terms:
        """Return what all ranks of a run have alike: the model, and the settings of what it
        computes. Files may be elsewhere on another machine."""
        groups, data = [getattr(self.options, name) for name in COMPARED], self.options.data
        settings = {f.name: getattr(group, f.name) for group in groups for f in fields(group)}
        settings |= {name: getattr(data, name) for name in SAMPLING if name not in ("data", "seed")}
        terms = Terms()
        terms.take({f"--{name.replace('_', '-')}": value for name, value in settings.items()})
        terms.take_config(self.config)
        return terms

    def settle_epochs(self, samples: int) -> None:
        """Count the steps of --epochs, now that the samples of one are known."""
        settle_steps(self.options, samples, self.first_step, self.state["consumed_samples"])
        self.check_remaining()

    def check_remaining(self) -> None:
        """Note whether torchrun has started the program again after the last step. UserError if a
        user asks for no more steps than there have been."""
        if is_restart() and self.first_step >= self.options.training.steps:
            self.finished = True
        else:
            check_steps(self.options, self.first_step)

    def settle_dtype(self, device: str) -> None:
        """Choose the dtype for a device, "cuda" or "cpu", if the settings name none.

        A resumed run keeps its dtype on any device: its settings name it, and should they not, it
        is float32.
        """
        training = self.options.training
        self.dtype_chosen = training.dtype is None
        if self.dtype_chosen:
            training.dtype = "float32" if self.resuming else default_dtype(device)

    def note_on_precision(self, device: str) -> str:
        """Return what to say of the dtype, to end a line with: nothing of float32 on a CPU."""
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

    def microbatches(self, ctx: ParallelContext) -> int:
        """The micro-batches of a replica's part of the global batch."""
        training = self.options.training
        return training.global_batch_size // ctx.dp_size // training.micro_batch_size

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step: with Muon that of matrices, to which AdamW's is in
        proportion."""
        optimizer = self.options.optimizer
        lr, min_lr = optimizer.lr, optimizer.min_lr
        if optimizer.optimizer == "muon":
            min_lr = min_lr * optimizer.muon_lr / lr if lr else 0.0
            lr = optimizer.muon_lr
        return learning_rate(
            step,
            schedule=optimizer.lr_schedule,
            lr=lr,
            min_lr=min_lr,
            warmup_steps=optimizer.warmup_steps,
            steps=optimizer.lr_decay_steps,
        )

    def is_last(self, step: int) -> bool:
        return step == self.options.training.steps

    def validates_at(self, step: int) -> bool:
        """Whether the validation loss is measured after a step."""
        evaluation = self.options.evaluation
        interval = evaluation.eval_interval
        due = self.is_last(step) or (interval and step % interval == 0)
        return bool(due and evaluation.eval_steps and self.sources.shares[1])

    def tests_at(self, step: int) -> bool:
        """Whether the test loss is measured after a step."""
        return bool(
            self.is_last(step) and self.options.evaluation.eval_steps and self.sources.shares[2]
        )

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due after a step, unless the run is stopped there."""
        interval = self.options.checkpoint.save_interval
        return self.is_last(step) or bool(interval and step % interval == 0)


def resumed_state(checkpoint: Checkpoint | None) -> dict:
    """Return where a run stands: its step, samples and tokens consumed, and settings. Without a
    checkpoint that is the start. UserError if the checkpoint is not of a training run."""
    if checkpoint is None:
        return {"step": 0, "consumed_samples": 0, "consumed_tokens": 0, "settings": {}}
    missing = {"step", "consumed_samples", "consumed_tokens", "settings"} - set(checkpoint.trainer)
    if missing:
        raise UserError(
            f"{checkpoint.path} is not of a training run: trainer.json has no {min(missing)}; "
            "--load-weights-only starts a new run with its weights"
        )
    file = checkpoint.path / TRAINER
    settings = checked_state(checkpoint.trainer, TrainingState, file).settings
    _check_kept(settings, file)
    return {**checkpoint.trainer, "settings": typed_settings(Options, settings, str(file))}


def notes_on_changes(run: Run) -> list[str]:
    """Return what to say of a run that is resumed: that the checkpoint names its data, and which
    settings of the samples and of what is drawn are others than the checkpoint's."""
    before, options, notes = run.state["settings"], run.options, []
    data = options.data.data
    if before.get("data") == data != DataOptions.data:
        notes.append(f"data: {' '.join(data)}, as the checkpoint says")
    for name in SAMPLING:
        group = options.training if name == "seed" else options.data
        now = getattr(group, name)
        if before.get(name, now) != now:
            what, then = name.replace("_", "-"), said(before[name])
            notes.append(f"{what}: {said(now)}; the checkpoint's run had {then}")
    return notes


def said(value) -> str:
    """Return the value of a setting as it is written after its flag."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _check_kept(settings: dict, file: Path) -> None:
    """Refuse settings that no run keeps: paths of what it writes, above all. The types and ranges
    of those that it keeps are checked where they are read: see `parse_options`.

    A setting that this version does not know is refused, too, for to leave it out might change what
    is computed.
    """
    kept = [f.name for group in KEPT for f in fields(group)]
    for name, value in settings.items():
        if name not in kept:
            name = name if name.isidentifier() else brief(name)
            raise UserError(f"{file}: settings has {name}, which a run does not keep")
        if name == "tokenizer" and value != "byte":
            raise UserError(
                f"{file}: tokenizer is {brief(value)}: a checkpoint may name only byte, "
                "or have a tokenizer's files"
            )


def settings_to_resume(options: Options) -> dict:
    """Return what a checkpoint keeps, so that a run goes on as it was: all settings but the layout,
    and what is printed or saved."""
    # those of KEPT
    groups = (options.training, options.optimizer, options.data, options.evaluation)
    settings = {f.name: getattr(group, f.name) for group in groups for f in fields(group)}
    return {name: value for name, value in settings.items() if value is not None}
