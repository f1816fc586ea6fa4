"""Train in the processes of a check: keep what is computed on the way, and compare it with what one
process has kept."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from unittest import mock

import torch

from megazoo import lora
from megazoo.cli.parsing import run_file
from megazoo.layers import Dropout
from megazoo.models.adapters import ALL, is_adapter
from megazoo.models.pretrained import from_pretrained
from megazoo.models.registry import config_from_dict, from_config
from megazoo.optim.adamw import AdamW
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import initialize
from megazoo.parallel.random import derive_seed
from megazoo.testing.batches import KINDS, MICRO_BATCHES, ROWS, make_batch, micro_batches_of
from megazoo.testing.layouts import Layout
from megazoo.testing.parts import part_of
from megazoo.testing.shrink import shrink

# Adam's epsilon: with a small one, gradients that are nothing but rounding make steps as large as
# any.
EPSILON = 1e-3
CLIP = 0.1  # small enough to be active

_imported: set[Path] = set()


def import_once(file: Path | None) -> None:
    """Run the Python file that registers a model, if there is one, unless this process has."""
    if file and file not in _imported:
        _imported.add(file)
        run_file(file)


@dataclass(frozen=True)
class Subject:
    """The model that is checked, as any process can build it.

    family, values: its config. load: a directory with its weights. import_: a file that registers
    it. lora_rank: of adapters of all its linear layers, which alone are trained; 0 for none.
    """

    family: str
    values: dict
    load: Path | None
    import_: Path | None
    lora_rank: int = 0

    @property
    def config(self):
        """The model's config, its file imported once."""
        import_once(self.import_)
        return config_from_dict(self.family, self.values)


@dataclass
class Record:
    """What one process keeps, by global name.

    activations: of the first step with each kind of batch, ("input" or "output", module) -> what
    its forwards were given or returned, [rows of the batch, ...], in the order of the computation.
    gradients: of each step. seeds: what each Dropout drew from.
    """

    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    activations: list[dict[tuple[str, str], torch.Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    seeds: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Findings:
    """What a rank found: its distances from the Record, and what is to be compared with other
    ranks.

    coordinates: its rank along each axis. tied: parameters that other stages have, too. seeds: what
    each Dropout drew from, after whether tp ranks should differ. factors: of each parameter, by
    what its expected gradient of the first step is to be multiplied to come closest to the rank's.
    """

    coordinates: dict[str, int]
    tied: set[str]
    names: set[str]
    seeds: dict[str, tuple[bool, list[int]]]
    initial: dict[str, float] = field(default_factory=dict)
    activations: list[dict[tuple[str, str], float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, float]] = field(default_factory=list)
    factors: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


def train_in_one_process(subject: Subject, steps: int, path: Path) -> None:
    """Train on whole batches, and save the Record of it."""
    record, ctx = Record(), ParallelContext()
    seeds = _dropout_seeds(subject, Layout(), ctx)
    record.seeds = {site: drawn for site, (_, drawn) in seeds.items()}
    model = _build(subject, ctx)
    record.initial = _copies(model)
    for loss, optimizer in _train(model, Layout(), steps, record, micro_batches=1):
        record.losses.append(loss)
        record.gradients.append({name: grad.clone() for name, grad in _gradients(model).items()})
        record.norms.append(optimizer.step().item())
    record.weights = _copies(model)
    torch.save(record, path)


def train_on_a_rank(subject: Subject, layout: Layout, steps: int, path: Path) -> Findings:
    """Train this rank's part of a layout, and return how far it is from the Record at `path`."""
    expected: Record = torch.load(path, weights_only=False, mmap=True)
    ctx = layout.context()
    seeds = _dropout_seeds(subject, layout, ctx)
    model, record = _build(subject, ctx), Record()
    weights = _copies(model)
    found = Findings(
        coordinates={name: ctx.axis(name).rank for name in ("tp", "cp", "pp", "dp")},
        tied=set(model.tied),
        names=set(weights),
        seeds=seeds,
        initial=_distances(weights, expected.initial, model),
    )
    steps_of_training = _train(model, layout, steps, record, micro_batches_of(layout.dp))
    for (loss, optimizer), gradients in zip(steps_of_training, expected.gradients, strict=True):
        found.losses.append(loss)
        if not layout.zero:  # under which a gradient is whole on no rank
            ours = _gradients(model)
            found.gradients.append(_distances(ours, gradients, model))
            found.factors = found.factors or _factors(ours, gradients, model)
        found.norms.append(optimizer.step().item())
    found.weights = _distances(_copies(model), expected.weights, model)
    found.activations = [
        _activation_distances(model, ours, whole)
        for ours, whole in zip(record.activations, expected.activations, strict=True)
    ]
    return found


def _build(subject: Subject, ctx: ParallelContext):
    """Build the model, with random biases, norms and adapters, and without dropout."""
    config = subject.config
    if subject.load:
        model = from_pretrained(subject.load, ctx, dtype=torch.float32)
    else:
        model = from_config(config, ctx, seed=3)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.probability = 0.0
    if subject.lora_rank:
        lora.add(model, subject.lora_rank, alpha=subject.lora_rank, targets=ALL)
    for entry in model.entries():
        if entry.parameter.dim() == 1 or entry.spec.std == entry.spec.bound == 0:
            spec = replace(entry.spec, std=0.1)
            initialize(entry.parameter.data, spec, ctx, derive_seed(7, entry.name))
    return model


def _dropout_rates(config) -> list[str]:
    """Return the names of a config's rates of dropout."""
    return [f.name for f in fields(config) if f.name.endswith("dropout")]


def _train(
    model, layout: Layout, steps: int, record: Record, micro_batches: int
) -> Iterator[tuple[float, AdamW]]:
    """Yield the loss of each step, and the optimizer, which the caller then steps.

    Before that the gradients are those that backward made; stepping clips them. `record` gets the
    activations of the first steps.
    """
    config = model.config
    optimizer = AdamW(model, lr=1e-3, eps=EPSILON, clip_grad=CLIP, zero=layout.zero)
    longest = model.longest_sequence(config)
    for step in range(steps):
        batch = make_batch(step, config.vocab_size, longest)
        with _recording(model, record) if step < len(KINDS) else nullcontext():
            loss = model.train_batch(
                **{name: _own_rows(tensor, model.ctx) for name, tensor in batch.items()},
                num_microbatches=micro_batches,
                schedule=layout.schedule,
                step=step,
            )
        yield loss.item(), optimizer


def _own_rows(tensor: torch.Tensor, ctx: ParallelContext) -> torch.Tensor:
    """Return the rows of the global batch that are this replica's."""
    return tensor.chunk(ctx.dp_size)[ctx.dp_rank]


def _gradients(model) -> dict[str, torch.Tensor]:
    """Return the gradients of the parameters that are trained, by global name; zeros for one that
    has got none, so that it is compared, too."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _copies(model) -> dict[str, torch.Tensor]:
    """Copy the parameters, by global name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@contextmanager
def _recording(model, record: Record):
    """Within this block keep what modules are given and return: one more of
    `record.activations`."""
    handles, kept = [], {}

    def keep(kind: str, name: str, value) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            kept.setdefault((kind, name), []).append(value.detach().clone())

    def watch(name: str, module: torch.nn.Module) -> None:
        def before(_, given):
            keep("input", name, given[0])

        def after(_, given, returned):
            keep("output", name, returned)

        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after))

    for name, module in model.named_modules():
        if not is_adapter(f"{name}."):  # what adapters return may be a part of a sum
            watch(name, module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        record.activations.append({key: torch.cat(parts) for key, parts in kept.items()})


def _dropout_seeds(
    subject: Subject, layout: Layout, ctx: ParallelContext
) -> dict[str, tuple[bool, list[int]]]:
    """Return what each Dropout of a small model of the kind draws from, after whether tp ranks
    should differ.

    It is trained one step, in which all replicas are given the same tokens.
    """
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
    batch = make_batch(0, config.vocab_size, model.longest_sequence(config))
    with mock.patch.object(Dropout, "draw", recorded):
        model.train_batch(**batch, num_microbatches=MICRO_BATCHES, schedule=layout.schedule, step=0)
    return seeds


def _activation_distances(model, ours: dict, expected: dict) -> dict[tuple[str, str], float]:
    """Return how far this rank's activations of a step are from its part of those of one process.

    What that part is can't always be told: see part_of.
    """
    distances = {}
    for name, module in model.named_modules():
        for kind, dim in (("input", 1), ("output", 0)):
            mine, whole = ours.get((kind, name)), expected.get((kind, name))
            if mine is None or whole is None or len(whole) != ROWS:
                continue
            parts = part_of(_own_rows(whole, model.ctx), mine, module, dim, model.ctx)
            if parts is not None:
                mine, part = parts
                distances[kind, name] = relative((mine - part).norm(), part.norm())
    return distances


def relative(distance: torch.Tensor | float, size: torch.Tensor | float) -> float:
    """Return a distance over the size of what is expected; inf for nan."""
    value = float(distance) / max(float(size), 1e-30)
    return math.inf if math.isnan(value) else value


def _pairs(
    tensors: dict, expected: dict, model
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield, of each parameter that both have, its name, and what this rank has and should have, in
    double precision."""
    ctx = model.ctx
    for entry in model.entries():
        if entry.name in expected:
            pieces, whole = entry.spec.pieces(ctx.tp_size, ctx.tp_rank), expected[entry.name]
            boxes = [tuple(slice(*bounds) for bounds in piece.box) for piece in pieces]
            ours = torch.cat([tensors[entry.name][piece.index()].flatten() for piece in pieces])
            theirs = torch.cat([whole[box].flatten() for box in boxes])
            yield entry.name, ours.double(), theirs.double()


def _distances(tensors: dict, expected: dict, model) -> dict[str, float]:
    """Return how far this rank's tensor of each parameter is from the expected one.

    The distance is over the whole tensor's norm, or over a thousandth of that of all together if
    that is more.
    """
    norms = {name: tensor.double().norm() for name, tensor in expected.items()}
    least = 1e-3 * torch.stack(list(norms.values())).norm()
    pairs = _pairs(tensors, expected, model)
    return {
        name: relative((ours - theirs).norm(), max(norms[name], least))
        for name, ours, theirs in pairs
    }


def _factors(gradients: dict, expected: dict, model) -> dict[str, float]:
    """Return, of each parameter, by what its expected gradient comes closest to this rank's."""
    return {
        name: relative(ours @ theirs, theirs @ theirs)
        for name, ours, theirs in _pairs(gradients, expected, model)
        if theirs.norm() > 1e-6
    }
