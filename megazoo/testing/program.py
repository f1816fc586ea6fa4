"""Check the numbers that the training program prints: run it in one process and on the ranks of a
layout, and compare its metrics.

The losses that it logs must be those that `train_batch` returned. The validation loss must be the
mean over the tokens of all validation batches, not the mean of their means.
"""

import io
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megazoo.environment import is_rank_zero
from megazoo.families.registry import FAMILIES, config_from_dict
from megazoo.losses.registry import loss_named
from megazoo.models.base import Model
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.parallel.storage import in_memory
from megazoo.settings import with_settings
from megazoo.testing.batches import ROWS, micro_batches_of
from megazoo.testing.distances import relative
from megazoo.testing.draws import recorded_seeds
from megazoo.testing.trial import Subject, distant_model
from megazoo.trainer.adapters import open_weights
from megazoo.trainer.loop import train
from megazoo.trainer.options import Options, layout_settings, with_registered
from megazoo.trainer.preparation import check, complete, connect
from megazoo.trainer.run import Run
from megazoo.trainer.state import resumed_state

STEPS, EVALUATED = 2, 2
EQUAL = ("loss", "grad_norm", "lr", "eval_loss")  # metrics that are the same in every layout
OTHER_EQUAL = ("consumed", "auxiliary_", "expert_load")  # the first characters of other ones
SEQUENCE = 24  # tokens
VOCABULARY = 264  # at least the 257 tokens of the byte tokenizer
CONFIG, DATA, REFERENCE = "model.json", "rows.jsonl", "reference"
PEAK = 0.5  # TFLOP/s, for the MFU


@dataclass
class Numbers:
    """What the program returned and logged in a run.

    Attributes:
        seeds: Dropout seed of each micro-batch in training.
        rows: Checksum of each training row of this rank.
        returned: Loss of each step, as `train_batch` returned it.
        evaluated: Mean loss over the tokens of all batches of each evaluation.
        changed: Parameters of this rank that an evaluation changes.
        logged: The metrics of each step.
        ranks: Number of ranks.
        metrics: Names of the metrics of the loss.
    """

    seeds: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    returned: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    logged: list[dict[str, Any]] = field(default_factory=list)
    ranks: int = 1
    metrics: tuple[str, ...] = ()

    def values(self) -> Iterator[tuple[str, float]]:
        """Yield the name and the value of each number of the metrics that must be the same in every
        layout."""
        for record in self.logged:
            when = f"step {record['step']}"
            for name, value in record.items():
                of_loss = name.removeprefix("eval_") in self.metrics
                if name in EQUAL or name.startswith(OTHER_EQUAL) or of_loss:
                    yield f"{name} of {when}", value
            if "tokens_per_second" in record:
                tokens = record["tokens_per_second"] * record["step_time"]
                yield f"tokens_per_second x step_time of {when}", tokens
                rate = record["tokens_per_second"] / self.ranks
                yield f"tflops per token of {when}", record["tflops"] / rate
                yield f"mfu / tflops of {when}", record["mfu"] / record["tflops"]


def run_the_program(
    subject: Subject,
    layout: Layout,
    directory: Path,
    name: str = "",
    further: dict | None = None,
) -> Numbers:
    """Run the training program on this rank. Rank 0 reads its metrics.

    Args:
        subject: The model.
        layout: The layout.
        directory: Where `write_inputs` has written the config and the data.
        name: Of the run; different for each run of a layout.
        further: Further settings.
    """
    numbers = Numbers(ranks=layout.ranks)
    metrics = directory / f"{layout}{name}.jsonl"
    settings = _settings(subject, layout, directory) | {"metrics": metrics} | (further or {})
    if is_rank_zero():  # the metrics are appended
        metrics.unlink(missing_ok=True)
    quiet = redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO())
    with subject.within(), _recorded(numbers), quiet[0], quiet[1]:
        run = _run_with(settings)
        numbers.metrics = run.loss.metrics if run.loss else ()
        train(run, connect(run))
        if dist.is_initialized():
            dist.destroy_process_group()
    if metrics.is_file():
        numbers.logged = [json.loads(line) for line in metrics.read_text().splitlines()]
    return numbers


def differences(found: Numbers, expected: Numbers, tolerance: float) -> Iterator[str]:
    """Yield a sentence for each number that is wrong. expected: of one process."""
    losses = [record["loss"] for record in found.logged if "loss" in record]
    yield from _unlike("the logged loss", losses, "the loss of the step", found.returned, tolerance)
    losses = [record["eval_loss"] for record in found.logged if "eval_loss" in record]
    what = "the mean over the tokens of the evaluation"
    yield from _unlike("the logged eval_loss", losses, what, found.evaluated, tolerance)
    for name in sorted(found.changed):
        yield f"evaluation changes {name}"
    here, there = dict(found.values()), dict(expected.values())
    for name in dict.fromkeys([*here, *there]):
        value, other = (
            math.nan if number is None else number for number in (here.get(name), there.get(name))
        )
        most = tolerance * (10 if name.startswith("grad_norm") else 1)
        # A metric of a loss can be a difference that is almost 0.
        least = 1.0 if name.split(" of ")[0].removeprefix("eval_") in found.metrics else 0.0
        if not relative(abs(value - other), max(abs(other), least)) <= most:
            yield f"{name} is {value:.7g}, but {other:.7g} in one process"


def differences_of_resumed(
    whole: list[Numbers], resumed: list[Numbers], tolerance: float
) -> Iterator[str]:
    """Yield a sentence for each number that differs after a run is resumed. whole: of a run that
    did not stop, of all ranks. resumed: of the run that was resumed after the first step."""
    for rank, (one, other) in enumerate(zip(whole, resumed, strict=True)):
        if one.seeds[-len(other.seeds) :] != other.seeds:
            yield f"the resumed run has other dropout seeds on rank {rank}"
    expected = {name: value for name, value in whole[0].values() if name.endswith(f"step {STEPS}")}
    found = dict(resumed[0].values())
    for name, value in expected.items():
        now = found.get(name, math.nan)
        if not relative(abs(now - value), abs(value)) <= 10 * tolerance:
            text = f"{name} is {now:.7g} in the resumed run"
            yield f"{text}, but {value:.7g} in one that did not stop"


def samples_are_continued(whole: Numbers, resumed: Numbers) -> bool:
    """Return whether a run in one process that resumes with a larger batch begins with the samples
    that follow those before the checkpoint. whole: of the run that saved after the first step."""
    return resumed.rows[:ROWS] == whole.rows[ROWS : 2 * ROWS]


def _unlike(
    what: str, values: list[float], of: str, expected: list[float], tolerance: float
) -> Iterator[str]:
    for value, other in zip(values, expected, strict=False):
        if not relative(abs(value - other), abs(other)) <= tolerance:
            yield f"{what} is {value:.7g}, but {of} is {other:.7g}"
    if len(values) != len(expected):
        yield f"{what} has {len(values)} values, not {len(expected)}"


def write_inputs(subject: Subject, directory: Path) -> None:
    """Write the config of the model, the data of the runs, and the model that a loss needs as a
    reference. The models have the vocabulary of the byte tokenizer, and no dropout."""
    values = {**subject.values, "vocab_size": VOCABULARY}
    values |= {name: 0.0 for name in values if name.endswith("dropout")}
    (directory / CONFIG).write_text(json.dumps({"model": subject.family, **values}))
    lengths = [18 if n % 8 == 3 or n > 80 else 1 + n % 3 for n in range(4 * ROWS)]  # uneven
    rows = [{"prompt": "ab", "completion": "c" * length} for length in lengths]
    loss = loss_named(subject.loss)
    if loss and loss.rows_together == 2:
        rows = [{"prompt": "ab", "chosen": "c" * size, "rejected": "de"} for size in lengths]
    if loss and loss.needs:
        config = config_from_dict(subject.family, values)
        distant_model(config, ParallelContext()).save_parallelized(directory / REFERENCE)
    (directory / DATA).write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def _recorded(numbers: Numbers) -> Iterator[None]:
    """Within this block, record what the model returns to the program."""
    train, evaluate, parts = Model.train_batch, Model.eval_batch, []

    def train_batch(self, *arguments, **options):
        ids = options.get("input_ids")
        if ids is not None:  # padding is 0
            numbers.rows += (ids * torch.arange(1, ids.shape[1] + 1)).sum(1).tolist()
        with recorded_seeds() as seeds:
            loss = train(self, *arguments, **options)
        numbers.seeds += seeds
        numbers.returned.append(loss.item())
        return loss

    def eval_batch(self, *arguments, **options):
        entries = in_memory(self, self.entries())
        before = {entry.name: entry.parameter.clone() for entry in entries}
        mean, count = evaluate(self, *arguments, **options)
        for entry in in_memory(self, self.entries()):
            if not torch.equal(entry.parameter, before[entry.name]):
                numbers.changed.add(entry.name)
        parts.append((mean.item(), count.item()))
        return mean, count

    with (
        mock.patch.object(Model, "train_batch", train_batch),
        mock.patch.object(Model, "eval_batch", eval_batch),
    ):
        yield
    for first in range(0, len(parts), EVALUATED):
        some = parts[first : first + EVALUATED]
        whole = sum(count for _, count in some)
        numbers.evaluated.append(sum(mean * count for mean, count in some) / whole)


def _run_with(settings: dict) -> Run:
    """Return the run of these settings, which resumes if they name a checkpoint."""
    new = with_registered(Options)
    options = with_settings(new(), settings)
    weights = open_weights(options)
    resumed = weights.resumed(options)
    state = resumed_state(resumed)
    options = with_settings(new(), {**state["settings"], **settings})
    run = complete([], options, weights, state, resuming=resumed is not None)
    return check(run, options.replicas)


def _settings(subject: Subject, layout: Layout, directory: Path) -> dict[str, Any]:
    """Return the settings of the run."""
    longest = FAMILIES[subject.family].longest_sequence(subject.config)
    adapters = {"lora_rank": subject.lora_rank, "lora_targets": ",".join(subject.targets)}
    reference = directory / REFERENCE
    loss = {"loss": subject.loss, "reference": reference if reference.exists() else None}
    return {
        "model": str(directory / CONFIG), "data": (str(directory / DATA),), "split": "50,50,0",
        "seq_length": min(longest, SEQUENCE), "global_batch_size": ROWS,
        "micro_batch_size": ROWS // layout.dp // micro_batches_of(layout.dp),
        "steps": STEPS, "eval_interval": 1, "eval_steps": EVALUATED, "peak_tflops": PEAK,
        "dtype": "float32", "device": "cpu", "optimizer": subject.optimizer,
        **(adapters if subject.lora_rank else {}), **loss,
        **{name: getattr(layout, name) for name in layout_settings(type(layout))},
    }  # fmt: skip
