"""The state of a training run in trainer.json, and its schema."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from megazoo.checkpoint.schema import Count, checked_state

RunId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
OutputName = Annotated[str, Meta(pattern=r"^[a-z_]{1,64}\Z")]
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

    settings: see `megazoo.cli.settings.settings_to_resume`. metric_runs: the runs of metrics
    outputs by the name of the output. wandb_run, trackio_run: the same in earlier checkpoints.
    """

    step: Count
    consumed_samples: Count
    consumed_tokens: Count
    settings: dict[str, Any]
    metric_runs: dict[OutputName, MetricRun] = field(default_factory=dict)
    wandb_run: MetricRun | None = None
    trackio_run: MetricRun | None = None
    run: RunId | None = None
    data: list[DataSource] | None = None


def read_state(trainer: dict, file: Path) -> dict:
    """Return the contents of a trainer.json with the runs of all metrics outputs in `metric_runs`.
    UserError names `file`."""
    state = checked_state(trainer, TrainingState, file)
    earlier = {"wandb": state.wandb_run, "trackio": state.trackio_run}
    runs = {name: run for name, run in earlier.items() if run} | state.metric_runs
    return {**trainer, "metric_runs": runs}
