"""The state of a training run in trainer.json, and its schema."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from megazoo.checkpoint.places import TRAINER
from megazoo.checkpoint.schema import Count, checked_state
from megazoo.checkpoint.source import TensorSource
from megazoo.errors import UserError
from megazoo.files import brief
from megazoo.settings import described, typed_settings
from megazoo.trainer.options import (
    Options,
)

RunId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
OutputName = Annotated[str, Meta(pattern=r"^[a-z_]{1,64}\Z")]
Checksum = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
# The id or name of a run of a metrics output, which may make it the name of a file.
MetricRun = Annotated[str, Meta(pattern=r"^(?!\.+\Z)[^/\\\x00-\x1f\x7f]{1,200}\Z")]


@dataclass
class StreamPosition:
    """The position at which a streamed source resumes: see `megazoo.data.streaming.Position`."""

    sample: Count
    epoch: Count
    document: Count
    tokens: Count
    state: dict[str, Any] | None
    version: Annotated[str, Meta(max_length=100)] = ""


@dataclass
class DataSource:
    """The fingerprint of a data source, and its position if it is streamed."""

    source: str
    bytes: Count
    documents: Count
    checksum: Count
    position: StreamPosition | None = None


@dataclass
class TrainingState:
    """The state of the training program in trainer.json.

    settings: see `settings_to_resume`. callbacks: the state of each callback by its name.
    reference: checksum of the model of --reference.
    metric_runs, wandb_run, trackio_run: runs of outputs in earlier checkpoints.
    """

    step: Count
    consumed_samples: Count
    consumed_tokens: Count
    settings: dict[str, Any]
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    metric_runs: dict[OutputName, MetricRun] = field(default_factory=dict)
    wandb_run: MetricRun | None = None
    trackio_run: MetricRun | None = None
    run: RunId | None = None
    reference: Checksum | None = None
    data: list[DataSource] | None = None


def read_state(trainer: dict, file: Path) -> dict:
    """Return the contents of a trainer.json, those of earlier versions with their runs of outputs
    as the state of a callback. UserError names `file`."""
    state = checked_state(trainer, TrainingState, file)
    earlier = {"wandb": state.wandb_run, "trackio": state.trackio_run}
    runs = {name: run for name, run in earlier.items() if run} | state.metric_runs
    return {**trainer, "callbacks": {"outputs": runs, **state.callbacks}}


def resumed_state(checkpoint: TensorSource | None, kind: type = Options) -> dict:
    """Return the state of a run: its step, samples and tokens consumed, and settings.

    Without a checkpoint, it is the initial state. kind: `Options`, with the settings of registered
    parts. UserError if the checkpoint is not from a training run.
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
    _check_kept(state, kind, file)
    return {**state, "settings": typed_settings(kind, state["settings"], str(file))}


def _check_kept(state: dict, kind: type, file: Path) -> None:
    """Raise UserError for settings that no checkpoint stores, above all paths of outputs.

    Unknown settings also raise an error, because omitting one might change the computation.
    `CommandLine` checks the types and ranges of valid settings.
    """
    known, imported = described(kind), state.get("import")
    hint = f"; its run used --import {brief(imported)}" if isinstance(imported, str) else ""
    for name, value in state["settings"].items():
        if name not in known or not known[name].kept:
            hint = hint if name.isidentifier() and name not in known else ""
            name = name if name.isidentifier() else brief(name)
            raise UserError(
                f"{file}: settings has {name}, which a checkpoint must not contain{hint}"
            )
        if name == "tokenizer" and value != "byte":
            raise UserError(
                f"{file}: tokenizer is {brief(value)}: a checkpoint may only name byte, "
                "or contain the files of a tokenizer"
            )


def settings_to_resume(options: Options) -> dict:
    """Return the settings that a checkpoint stores to resume the run. Those of the model and the
    adapters are in its manifest; the layout, the checkpoints and the logging may change."""
    settings, values = described(type(options)), options.values.items()
    return {name: value for name, value in values if settings[name].kept and value is not None}
