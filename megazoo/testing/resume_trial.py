"""The runs of the check of resuming: one process that never stops, and the ranks of layouts that
save and resume, with what each rank records."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megazoo import checkpoint
from megazoo.constants import IGNORE_INDEX
from megazoo.data.loading import Batches
from megazoo.data.order import Blend
from megazoo.data.samples import Sample, sample_of
from megazoo.engine.auxiliary import counts_tokens
from megazoo.optim.base import MASTER
from megazoo.optim.learning_rate import lr_schedule
from megazoo.optim.loss_scale import LossScale
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.parallel.random import derive_seed
from megazoo.parallel.storage import in_memory, storage_of
from megazoo.testing.batches import ROWS, SEQUENCE, micro_batches_of
from megazoo.testing.distances import parameter_distances, relative
from megazoo.testing.draws import recorded_seeds
from megazoo.testing.layouts import context_of
from megazoo.testing.optimizer_trial import (
    LOSS_SCALE,
    OF_MATRICES,
    SETTINGS,
    make_optimizer,
    matrix_rows_of,
)
from megazoo.testing.trial import Subject, build, import_once

STOP, LAST = 2, 4  # steps before the checkpoint, and of the whole run
SAMPLES = 30  # of the dataset: epochs end within steps
SCHEDULE = lr_schedule("cosine", lr=2e-3, min_lr=0.0, warmup_steps=3, steps=6)
WEIGHTS = "weights"  # the name of the parameters among the states


@dataclass
class Run:
    """What a rank records in a run, by step.

    Attributes:
        batches: A checksum of each row of the global batch; 0 for rows that the rank does not have.
        rates: Learning rate and weight decay of each trained parameter.
        seeds: Seeds of the dropout of each micro-batch.
        losses: Losses.
        norms: Gradient norms.
        scales: States of the loss scale after the step.
        states: States of the parameters after the step, by kind and name; of one process only.
    """

    batches: dict[int, list[int]] = field(default_factory=dict)
    rates: dict[int, dict[str, tuple[float, float]]] = field(default_factory=dict)
    seeds: dict[int, list[int]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    scales: dict[int, dict] = field(default_factory=dict)
    states: dict[int, dict[str, dict[str, torch.Tensor]]] = field(default_factory=dict)


@dataclass
class Resumed(Run):
    """What a rank that resumes a run records in addition.

    Attributes:
        place: The rank along each axis, as a text.
        step, samples: The numbers of steps and samples in the checkpoint.
        updates: The number of steps of the optimizer after loading.
        loaded: Distances of the loaded states from the saved ones, by kind and name; infinite if
            only one of them exists.
        distances: Distances of the states after a step from those of one process, by step, kind and
            name.
    """

    place: str = ""
    step: int = 0
    samples: int = 0
    updates: float = 0.0
    loaded: dict[str, dict[str, float]] = field(default_factory=dict)
    distances: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)


class Rows:
    """A small dataset with rows of different lengths. vocabulary: number of tokens. longest: of a
    row, in tokens."""

    def __init__(self, vocabulary: int, longest: int):
        self.vocabulary, self.longest = vocabulary, min(longest, SEQUENCE)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        generator = np.random.default_rng(derive_seed(5, "rows", index))
        length = max(2, self.longest - index % 5)
        return sample_of(generator.integers(self.vocabulary, size=length + 1))


def train_without_a_stop(subject: Subject, path: Path) -> None:
    """Train all steps in one process, and save the record."""
    with subject.within():
        model, optimizer, run = _started(subject, Layout(), ParallelContext())
        for step in _train(run, model, optimizer, Layout()):
            run.rates[step] = _rates_by_definition(model, subject.optimizer, step)
            if step <= STOP:
                continue
            run.states[step] = {
                kind: {name: tensor.clone() for name, (tensor, _) in states.items()}
                for kind, states in _states_of(model, optimizer).items()
            }
        torch.save(run, path)


def save_a_run(subject: Subject, layout: Layout, directory: Path) -> Run:
    """Train in a layout, save after STOP steps, and continue to the last step."""
    import_once(subject.import_)  # first: the file can register the schedule
    with subject.within():
        ctx = context_of(layout)
        model, optimizer, run = _started(subject, layout, ctx)
        for step in _train(run, model, optimizer, layout):
            if step == STOP:
                checkpoint.save(
                    directory, step, model, optimizer, {"consumed_samples": step * ROWS}
                )
                _save_pieces(model, optimizer, directory)
        return run


def resume_a_run(subject: Subject, layout: Layout, directory: Path, one: Path) -> Resumed:
    """Resume a run in a layout, and compare its states with the saved ones, and with the record of
    one process."""
    expected: Run = torch.load(one, weights_only=False, mmap=True)
    import_once(subject.import_)  # first: the file can register the schedule
    with subject.within():
        ctx = context_of(layout)
        model, optimizer, _ = _started(subject, layout, ctx, spoiled=True)
        opened = checkpoint.Checkpoint(directory)
        trainer = checkpoint.load(opened, model, optimizer)
        place = ", ".join(f"{name} {ctx.axis(name).rank}" for name in ("tp", "cp", "pp", "dp"))
        run = Resumed(place=f"{ctx.rank} ({place})")
        run.step, run.samples = trainer["step"], trainer["consumed_samples"]
        run.updates = optimizer.steps.item()
        run.loaded = _distances_from_saved(model, optimizer, directory)
        for step in _train(run, model, optimizer, layout, run.step, run.samples):
            run.distances[step] = {
                kind: parameter_distances(
                    {name: tensor for name, (tensor, _) in states.items()},
                    expected.states[step][kind],
                    model,
                    {name: ranges for name, (_, ranges) in states.items()},
                )
                for kind, states in _states_of(model, optimizer).items()
            }
        return run


def _started(
    subject: Subject, layout: Layout, ctx: ParallelContext, spoiled: bool = False
) -> tuple[Any, Any, Run]:
    """Build the model and the optimizer. spoiled: overwrite what a checkpoint must restore."""
    model = build(subject, ctx)
    if spoiled:
        with torch.no_grad():
            for entry in in_memory(model, model.trained_entries(), write=True):
                entry.parameter.fill_(0.5)
    # three good steps double it, in the first step after the checkpoint
    model.engine.loss_scale = LossScale(LOSS_SCALE, growth_interval=STOP + 1)
    if spoiled:
        model.engine.loss_scale.value, model.engine.loss_scale.patience = LOSS_SCALE / 4, 1
    optimizer = make_optimizer(subject.optimizer, model, layout, subject.offload)
    return model, optimizer, Run()


def _train(
    run: Run, model: Any, optimizer: Any, layout: Layout, step: int = 0, consumed: int = 0
) -> Iterator[int]:
    """Train from the state after a step, with `consumed` samples, to the last step. Record each
    step, and yield its number."""
    rows = Rows(model.config.vocab_size, model.longest_sequence(model.config))
    mark = counts_tokens(model)
    batches = Batches(Blend([rows], seed=11), ROWS, model.ctx, mark_padding=mark)
    starts = range(consumed, consumed + (LAST - step) * ROWS, ROWS)
    for number, batch in enumerate(batches.ahead(starts, 0), step + 1):
        _take_step(run, model, optimizer, layout, number, batch)
        yield number


def _sums_of_rows(batch: dict[str, torch.Tensor], ctx: ParallelContext) -> list[int]:
    """Return a checksum of each row of the global batch that this replica has; 0 for the others,
    and with context parallelism, which splits the rows."""
    sums = torch.zeros(ROWS, dtype=torch.int64)
    if ctx.cp_size == 1:
        places = torch.arange(1, batch["input_ids"].shape[1] + 1)
        tokens = batch["input_ids"].masked_fill(batch["targets"] == IGNORE_INDEX, 0)
        sums.chunk(ctx.dp_size)[ctx.dp_rank].copy_((tokens * places).sum(1))
    return sums.tolist()


def _take_step(
    run: Run, model: Any, optimizer: Any, layout: Layout, step: int, batch: dict
) -> None:
    """Train a step on a batch, and record it."""
    run.batches[step] = _sums_of_rows(batch, model.ctx)
    with recorded_seeds() as seeds:
        loss = model.train_batch(
            **batch,
            num_microbatches=micro_batches_of(layout.dp),
            schedule=layout.schedule,
            step=step,
        )
    optimizer.lr = SCHEDULE.rate(step)
    run.rates[step] = {
        name: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for name in group["names"]
    }
    run.seeds[step] = seeds
    run.losses[step], run.norms[step] = loss.item(), optimizer.step().item()
    run.scales[step] = model.engine.loss_scale.state()


def _rates_by_definition(model: Any, optimizer: str, step: int) -> dict[str, tuple[float, float]]:
    """Return the learning rate and the weight decay that each trained parameter must have in a
    step: a linear warm-up, then a cosine. Matrices of Muon have the rate of Muon, and AdamW's is
    proportional to it. Only parameters that decay have weight decay: see ParameterSpec."""
    peak, warmup, steps = SCHEDULE.lr, SCHEDULE.warmup_steps, SCHEDULE.steps
    fraction = max(0, step - warmup) / (steps - warmup)
    rate = peak * min(1, step / warmup) * (1 + math.cos(math.pi * fraction)) / 2
    matrices = matrix_rows_of(optimizer, model)
    ratio = SETTINGS["lr"] / OF_MATRICES["lr"] if matrices else 1.0
    rates = {}
    for entry in model.trained_entries():
        own = entry.name in matrices
        decay = OF_MATRICES["weight_decay"] if own else SETTINGS["weight_decay"]
        rates[entry.name] = rate if own else rate * ratio, decay if entry.spec.decays else 0.0
    return rates


States = dict[str, dict[str, tuple[torch.Tensor, tuple[int, int]]]]


def _states_of(model: Any, optimizer: Any) -> States:
    """Return this rank's parameters and states, by kind and name: a tensor with the shape of the
    rank's shard, and the range of its flattened elements that the rank has."""
    states: States = {WEIGHTS: {}}
    for entry in in_memory(model, model.entries()):
        weight = entry.parameter.detach()
        weight = weight.clone() if storage_of(model) else weight
        states[WEIGHTS][entry.name] = weight, (0, weight.numel())
    for entry in optimizer.entries:
        ranges = optimizer.ranges[entry.name]
        for kind, tensor in optimizer.state[entry.name].items():
            whole = tensor.new_zeros(entry.parameter.numel())
            whole[slice(*ranges)] = tensor.flatten()
            named = "master weights" if kind == MASTER else kind
            states.setdefault(named, {})[entry.name] = whole.view(entry.parameter.shape), ranges
    return states


def _boxes(
    model: Any, states: States
) -> Iterator[tuple[str, str, tuple, torch.Tensor, torch.Tensor]]:
    """Yield the kind, the name, a box of the global tensor, this rank's values in it, and which of
    them the rank has."""
    pieces = {entry.name: entry.spec.pieces(model.ctx.place) for entry in model.entries()}
    for kind, of_kind in states.items():
        for name, (tensor, (first, end)) in of_kind.items():
            places = torch.arange(tensor.numel()).view_as(tensor)
            there = (places >= first) & (places < end)
            for piece in pieces[name]:
                box = tuple(slice(*bounds) for bounds in piece.box)
                yield kind, name, box, tensor[piece.index()], there[piece.index()]


def _save_pieces(model: Any, optimizer: Any, directory: Path) -> None:
    """Save this rank's states next to a checkpoint."""
    place = Path(f"{directory}_states")
    place.mkdir(exist_ok=True)
    boxes = [
        (kind, name, box, values.clone(), there)
        for kind, name, box, values, there in _boxes(model, _states_of(model, optimizer))
    ]
    torch.save(boxes, place / f"{model.ctx.rank}.pt")


def _distances_from_saved(
    model: Any, optimizer: Any, directory: Path
) -> dict[str, dict[str, float]]:
    """Return the distances of this rank's states from those that `_save_pieces` saved, by kind and
    name; 0 if they are equal bit for bit."""
    specs = {entry.name: entry.spec for entry in model.entries()}
    whole: dict[tuple[str, str], torch.Tensor] = {}
    for file in Path(f"{directory}_states").iterdir():
        for kind, name, box, values, there in torch.load(file, weights_only=False):
            if name not in specs:
                continue
            if (kind, name) not in whole:
                shape = specs[name].shape
                whole[kind, name] = torch.full(shape, math.nan, dtype=torch.float64)
            whole[kind, name][box][there] = values[there].double()
    distances: dict[str, dict[str, float]] = {}
    states = _states_of(model, optimizer)
    trained = {entry.name for entry in optimizer.entries}
    for kind, name in whole:
        if name in trained and name not in states.get(kind, {}):
            distances.setdefault(kind, {})[name] = math.inf
    for kind, name, box, values, there in _boxes(model, states):
        found, distance = values[there].double(), math.inf
        if (kind, name) in whole:
            saved = whole[kind, name][box][there]
            distance = relative((found - saved).norm(), saved.norm())
            distance = 0.0 if torch.equal(found, saved) else max(distance, 1e-30)
        of_kind = distances.setdefault(kind, {})
        of_kind[name] = max(of_kind.get(name, 0.0), distance)
    return distances
