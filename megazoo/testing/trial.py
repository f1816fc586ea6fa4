"""What the processes of a check do: train, keep what comes by, and compare it with what one process
has kept."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from unittest import mock

import torch

from megazoo.cli.parsing import run_file
from megazoo.layers import Dropout
from megazoo.models.pretrained import from_pretrained
from megazoo.models.registry import config_from_dict, from_config
from megazoo.optim.adamw import AdamW
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import initialize
from megazoo.parallel.random import derive_seed
from megazoo.testing.layouts import Layout
from megazoo.testing.ranks import GROUP_TIMEOUT
from megazoo.testing.shrink import shrink

ROWS = 24  # of the global batch: for 1, 2, 3, 4, 6, 8, 12 or 24 replicas
SEQUENCE = 16
MICRO_BATCHES = 4
# Adam's epsilon: with a small one, gradients that are nothing but rounding make steps as large as
# any.
EPSILON = 1e-3
CLIP = 0.1  # small enough to be active

_imported: set[Path] = set()


@dataclass(frozen=True)
class Subject:
    """What is checked, in a form that any process can build. load: a directory with its weights;
    import_: a file that registers it."""

    family: str
    values: dict
    load: Path | None
    import_: Path | None

    @property
    def config(self):
        if self.import_ and self.import_ not in _imported:
            _imported.add(self.import_)
            run_file(self.import_)
        return config_from_dict(self.family, self.values)


@dataclass
class Record:
    """What one process keeps, by global name. passed: ("input" or "output", module) -> what its
    forwards were given or returned in the first step, along the batch, in the order of the
    computation. gradients: of each step. seeds: what each Dropout drew from."""

    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    passed: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    seeds: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Findings:
    """What a rank found: its distances from the Record, and what is to be compared with other
    ranks'.

    coordinates: tp, pp, dp. tied: parameters that other stages have, too. seeds: with whether tp
    ranks should differ.
    factors: what times a parameter's expected gradient, of the first step, comes closest to the one
    that is there.
    """

    coordinates: tuple[int, int, int]
    tied: set[str]
    names: set[str]
    seeds: dict[str, tuple[bool, list[int]]]
    initial: dict[str, float] = field(default_factory=dict)
    passed: dict[tuple[str, str], float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, float]] = field(default_factory=list)
    factors: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


def train_in_one_process(subject: Subject, steps: int, path: Path) -> None:
    record, ctx = Record(), ParallelContext()
    record.seeds = {
        site: seeds for site, (_, seeds) in _dropout_seeds(subject, Layout(), ctx).items()
    }
    model = _build(subject, ctx)
    record.initial = _copies(model)
    for loss, optimizer in _train(model, Layout(), steps, record, micro_batches=1):
        record.losses.append(loss)
        record.gradients.append(
            {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        )
        record.norms.append(optimizer.step().item())
    record.weights = _copies(model)
    torch.save(record, path)


def train_on_a_rank(subject: Subject, layout: Layout, steps: int, path: Path) -> Findings:
    expected: Record = torch.load(path, weights_only=False, mmap=True)
    how = {"sequence_parallel": layout.sequence_parallel, "virtual_pipeline_size": layout.virtual}
    sizes = (layout.tp, layout.pp, layout.dp)
    ctx = ParallelContext.from_torch(*sizes, **how, device="cpu", timeout=GROUP_TIMEOUT)
    seeds = _dropout_seeds(subject, layout, ctx)
    model, record = _build(subject, ctx), Record()
    weights = _copies(model)
    found = Findings((ctx.tp_rank, ctx.pp_rank, ctx.dp_rank), set(model.tied), set(weights), seeds)
    found.initial = _distances(weights, expected.initial, model)
    for step, (loss, optimizer) in enumerate(
        _train(model, layout, steps, record, _micro_batches(layout.dp))
    ):
        found.losses.append(loss)
        if not layout.zero:  # under which a gradient is whole on no rank
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            found.gradients.append(_distances(gradients, expected.gradients[step], model))
            found.factors = found.factors or _factors(gradients, expected.gradients[step], model)
        found.norms.append(optimizer.step().item())
    found.weights = _distances(_copies(model), expected.weights, model)
    for name, module in model.named_modules():
        for kind, dim in (("input", 1), ("output", 0)):
            ours, theirs = record.passed.get((kind, name)), expected.passed.get((kind, name))
            if ours is not None and theirs is not None and len(theirs) == ROWS:
                part = _part_of(theirs.chunk(layout.dp)[ctx.dp_rank], ours.shape, module, dim, ctx)
                if part is not None:
                    found.passed[kind, name] = relative((ours - part).norm(), part.norm())
    return found


def _build(subject: Subject, ctx: ParallelContext):
    """The model, biases and norms random."""
    config = subject.config
    if subject.load:
        model = from_pretrained(subject.load, ctx, dtype=torch.float32)
    else:
        model = from_config(config, ctx, seed=3)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.probability = 0.0
    for entry in model.entries():
        if entry.parameter.dim() == 1:
            spec = replace(entry.spec, std=0.1)
            initialize(entry.parameter.data, spec, ctx, derive_seed(7, entry.name))
    return model


def _dropout_rates(config) -> list[str]:
    return [f.name for f in fields(config) if f.name.endswith("dropout")]


def _micro_batches(dp: int) -> int:
    """Of a replica."""
    return max(count for count in range(1, MICRO_BATCHES + 1) if ROWS // dp % count == 0)


def _batch(step: int, vocab: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets; a row keeps the more labels the later it comes, so that micro-batches
    differ widely."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, vocab, (ROWS, sequence + 1), generator=generator)
    keep = (
        torch.rand(ROWS, sequence, generator=generator) < torch.arange(1, ROWS + 1)[:, None] / ROWS
    )
    return tokens[:, :-1], tokens[:, 1:].masked_fill(~keep, -100)


def _train(
    model, layout: Layout, steps: int, record: Record, micro_batches: int
) -> Iterator[tuple[float, AdamW]]:
    """The loss of each step, and the optimizer, which the caller steps after a look at the
    gradients: its own are the clipped ones. `record` gets what went through the modules in the
    first."""
    config = model.config
    optimizer = AdamW(model, lr=1e-3, eps=EPSILON, clip_grad=CLIP, zero=layout.zero)
    sequence = min(SEQUENCE, model.longest_sequence(config))
    for step in range(steps):
        batch = _batch(step, config.vocab_size, sequence)
        ids, targets = (tensor.chunk(layout.dp)[model.ctx.dp_rank] for tensor in batch)
        with _recording(model, record) if step == 0 else nullcontext():
            loss = model.train_batch(
                ids,
                targets=targets,
                num_microbatches=micro_batches,
                schedule=layout.schedule,
                step=step,
            )
        yield loss.item(), optimizer


def _copies(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@contextmanager
def _recording(model, record: Record):
    """Within this block keep what modules are given and return."""
    handles, kept = [], {}

    def keep(kind: str, name: str, value) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            kept.setdefault((kind, name), []).append(value.detach().clone())

    for name, module in model.named_modules():
        hooks = (
            module.register_forward_pre_hook(
                lambda _, given, name=name: keep("input", name, given[0])
            ),
            module.register_forward_hook(
                lambda _, __, returned, name=name: keep("output", name, returned)
            ),
        )
        handles += hooks
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        record.passed = {key: torch.cat(parts) for key, parts in kept.items()}


def _dropout_seeds(
    subject: Subject, layout: Layout, ctx: ParallelContext
) -> dict[str, tuple[bool, list[int]]]:
    """Of each Dropout of a small model of the kind: whether tp ranks should differ, and what it
    draws from, in a step in which all replicas are given the same."""
    config, draw, seeds = shrink(subject.config), Dropout.draw, {}
    if not _dropout_rates(config):
        return seeds

    @contextmanager
    def recorded(self, *arguments):
        with draw(self, *arguments):
            seeds.setdefault(self.site, (self.parallel, []))[1].append(torch.initial_seed())
            yield

    rates = dict.fromkeys(_dropout_rates(config), 0.1)
    model = from_config(replace(config, **rates), ctx, seed=3)
    ids, targets = _batch(0, config.vocab_size, min(SEQUENCE, model.longest_sequence(config)))
    with mock.patch.object(Dropout, "draw", recorded):
        model.train_batch(
            ids, targets=targets, num_microbatches=MICRO_BATCHES, schedule=layout.schedule, step=0
        )
    return seeds


def _part_of(
    whole: torch.Tensor, shape: torch.Size, module, dim: int, ctx: ParallelContext
) -> torch.Tensor | None:
    """What of a whole input (dim 1) or output (dim 0) of a module, [rows, sequence, features], a
    rank should have that has `shape`: all, its part of the sequence, or the features that its
    weight's dimension `dim` is of; None if that can't be told."""
    if whole.shape == shape:
        return whole
    if whole.dim() != 3 or len(shape) != 3:
        return None
    spec = getattr(module, "specs", {}).get("weight")
    if whole.shape[2] != shape[2]:
        if not spec or not spec.shard or spec.shard.dim != dim or spec.shape[dim] != whole.shape[2]:
            return None
        pieces = sorted(spec.pieces(ctx.tp_size, ctx.tp_rank), key=lambda piece: piece.offset[dim])
        whole = torch.cat([whole[..., slice(*piece.box[dim])] for piece in pieces], dim=-1)
    if ctx.sequence_parallel and whole.shape[1] == shape[1] * ctx.tp_size:
        whole = whole.chunk(ctx.tp_size, dim=1)[ctx.tp_rank]
    return whole if whole.shape == shape else None


def relative(distance: torch.Tensor | float, size: torch.Tensor | float) -> float:
    value = float(distance) / max(float(size), 1e-30)
    return math.inf if math.isnan(value) else value


def _pairs(
    tensors: dict, expected: dict, model
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Of each parameter that both have: its name, and in double precision what this rank has and
    should have."""
    ctx = model.ctx
    for entry in model.entries():
        if entry.name in expected:
            pieces, whole = entry.spec.pieces(ctx.tp_size, ctx.tp_rank), expected[entry.name]
            boxes = [tuple(slice(*bounds) for bounds in piece.box) for piece in pieces]
            ours = torch.cat([tensors[entry.name][piece.index()].flatten() for piece in pieces])
            yield (
                entry.name,
                ours.double(),
                torch.cat([whole[box].flatten() for box in boxes]).double(),
            )


def _distances(tensors: dict, expected: dict, model) -> dict[str, float]:
    """Of each parameter, this rank's distance, over the whole's norm, or a thousandth of all
    parameters' together."""
    norms = {name: tensor.double().norm() for name, tensor in expected.items()}
    least = 1e-3 * torch.stack(list(norms.values())).norm()
    pairs = _pairs(tensors, expected, model)
    return {
        name: relative((ours - theirs).norm(), max(norms[name], least))
        for name, ours, theirs in pairs
    }


def _factors(gradients: dict, expected: dict, model) -> dict[str, float]:
    return {
        name: relative(ours @ theirs, theirs @ theirs)
        for name, ours, theirs in _pairs(gradients, expected, model)
        if theirs.norm() > 1e-6
    }
