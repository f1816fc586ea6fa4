"""Train in the processes of a check. One process stores intermediate values, and the ranks of
layouts compare their values with them."""

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megazoo import lora
from megazoo.evaluation.scoring import score
from megazoo.families.registry import config_from_dict
from megazoo.layers import Attend, Dropout
from megazoo.lora.settings import every_target, is_adapter
from megazoo.losses.reference import Reference
from megazoo.losses.registry import loss_named
from megazoo.models.counts import whole_model
from megazoo.models.pretrained import from_pretrained
from megazoo.models.registry import from_config
from megazoo.optim.loss_scale import LossScale
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.parallel.module import initialize
from megazoo.parallel.random import derive_seed
from megazoo.parallel.storage import in_memory
from megazoo.testing.batches import KINDS, ROWS, make_batch, micro_batches_of, shifted
from megazoo.testing.distances import (
    Clue,
    activation_clues,
    activation_distances,
    gradient_clues,
    gradient_factors,
    gradients_of,
    own_rows,
    parameter_distances,
    relative,
)
from megazoo.testing.draws import Draws, dropout_draws
from megazoo.testing.layouts import context_of
from megazoo.testing.optimizer_trial import (
    LOSS_SCALE,
    beside_plain_steps,
    make_optimizer,
    matrix_rows_of,
    skips_overflow,
)
from megazoo.user_files import run_file

CLUES = 3  # number of differences of each kind that are analysed

_imported: set[Path] = set()


def import_once(file: Path | None) -> None:
    """Run the Python file that registers a model, if it is given and was not run in this process
    yet."""
    if file and file not in _imported:
        _imported.add(file)
        run_file(file)


@dataclass(frozen=True)
class Subject:
    """The model of a check, in a form from which any process can build it.

    Attributes:
        family: Name of the model family.
        values: Values of the config.
        load: Directory with weights, or None.
        import_: Python file that registers the model, or None.
        lora_rank: Rank of adapters on all layers that can have them, which are then the only
            trained parameters; 0 for none.
        optimizer: One of OPTIMIZERS.
        within: Function that returns a context manager in which every process trains.
        dtype: Name of the data type of the parameters.
        offload: Whether the state of the optimizer is stored on the CPU.
        loss: Name of the loss.
    """

    family: str
    values: dict
    load: Path | None
    import_: Path | None
    lora_rank: int = 0
    optimizer: str = "adamw"
    within: Callable[[], AbstractContextManager] = nullcontext
    dtype: str = "float32"
    offload: bool = False
    loss: str = "lm"

    @property
    def config(self) -> Any:
        """The model's config. The model's file is imported first."""
        import_once(self.import_)
        return config_from_dict(self.family, self.values)

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the layers that have adapters, if there are any."""
        return every_target(whole_model(self.config))


@dataclass
class Record:
    """Values that one process stores, by global name.

    Attributes:
        initial: Initial weights.
        wrongly_trained: Trained parameters that are not adapters, if adapters are trained.
        activations: For the first step of each kind of batch: inputs and outputs, [rows of the
            batch, ...], by ("input" or "output", module), in the order of the computation.
        losses: Loss per step.
        auxiliary: Auxiliary losses per step, by name.
        norms: Gradient norm per step.
        gradients: Gradients per step.
        weights: Weights after each step.
        logits: Logits of the first batch's first rows, before training.
        labelled: Number of labelled tokens of the first batch.
        rows: Sum of losses and number of labelled tokens per row of the first batch, before
            training: [rows, 2].
        generators: Generators of Python, NumPy or torch that the first steps use, and the module
            that uses them ("" if outside of modules).
        draws: Dropout seeds per Dropout.
        matrices: Number of rows of each matrix in the weights that Muon updates.
        plain: Distances of the weights from those of a reference optimizer.
        decaying: Distances of the weights from those of an AdamW that applies weight decay to all
            trained parameters.
    """

    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    wrongly_trained: list[str] = field(default_factory=list)
    activations: list[dict[tuple[str, str], torch.Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    auxiliary: list[dict[str, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    logits: torch.Tensor | None = None
    labelled: int = 0
    rows: torch.Tensor | None = None
    generators: dict[str, str] = field(default_factory=dict)
    draws: dict[str, Draws] = field(default_factory=dict)
    matrices: dict[str, tuple[int, ...]] = field(default_factory=dict)
    plain: dict[str, float] = field(default_factory=dict)
    decaying: dict[str, float] = field(default_factory=dict)


@dataclass
class Findings:
    """Distances of a rank's values from the Record, and values that are compared between ranks.

    Attributes:
        coordinates: The rank along each axis.
        tied: Parameters that other stages have too.
        copied: Parameters of which several tp ranks have the same rows.
        names: Names of the rank's parameters.
        draws: Dropout seeds per Dropout.
        initial: Distances of initial weights.
        generators: As in `Record`.
        activations: Distances of activations per step.
        activation_clues: Clues for the first activations of each step that differ on any rank.
        logits: Distance of the logits.
        labelled: Number of labelled tokens of the first batch.
        losses: Loss per step.
        auxiliary: Auxiliary losses per step, by name.
        norms: Gradient norm per step.
        gradients: Distances of gradients per step.
        gradient_clues: Clues for the first gradients of the first step that differ on any rank.
        factors: Factor between each gradient of the first step and the expected one; nan if it is
            not a multiple.
        weights: Distances of weights per step.
        skipped: Whether the rank skips a step whose gradients overflow on one rank; None if not
            tested.
    """

    coordinates: dict[str, int]
    tied: set[str]
    copied: set[str]
    names: set[str]
    draws: dict[str, Draws]
    initial: dict[str, float] = field(default_factory=dict)
    generators: dict[str, str] = field(default_factory=dict)
    activations: list[dict[tuple[str, str], float]] = field(default_factory=list)
    activation_clues: list[dict[tuple[str, str], Clue]] = field(default_factory=list)
    logits: float = 0.0
    labelled: int = 0
    losses: list[float] = field(default_factory=list)
    auxiliary: list[dict[str, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, float]] = field(default_factory=list)
    gradient_clues: dict[str, Clue] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    weights: list[dict[str, float]] = field(default_factory=list)
    skipped: bool | None = None


def train_in_one_process(subject: Subject, steps: int, path: Path) -> None:
    """Train on whole batches and save the Record."""
    with subject.within():
        record, ctx = Record(), ParallelContext()
        record.draws = dropout_draws(subject.config, Layout.schedule, ctx)
        model = build(subject, ctx)
        record.initial = _copies(model)
        if subject.lora_rank:
            trained = [entry.name for entry in model.trained_entries()]
            record.wrongly_trained = [name for name in trained if not is_adapter(name)]
        record.logits, record.labelled = _evaluated(model, micro_batches=1)
        record.rows = _losses_of_rows(model)
        record.matrices = matrix_rows_of(subject.optimizer, model)
        optimizer = make_optimizer(subject.optimizer, model, Layout())
        for loss in _train(subject, model, Layout(), steps, record, micro_batches=1):
            record.losses.append(loss)
            record.auxiliary.append(_auxiliary(model))
            gradients = gradients_of(model)
            record.gradients.append({name: grad.clone() for name, grad in gradients.items()})
            record.norms.append(optimizer.step().item())
            record.weights.append(_copies(model))
        record.plain, record.decaying = beside_plain_steps(
            model, record.initial, record.gradients, record.weights[-1], record.matrices
        )
        torch.save(record, path)


def train_on_a_rank(
    subject: Subject, layout: Layout, steps: int, path: Path, tolerance: float
) -> Findings:
    """Train this rank's shard of the model.

    Args:
        subject: The model.
        layout: The layout.
        steps: Number of steps.
        path: File of the Record of one process.
        tolerance: Larger distances are analysed for clues.

    Returns:
        The distances from the Record.
    """
    expected: Record = torch.load(path, weights_only=False, mmap=True)
    with subject.within():
        config = subject.config  # first: its file can register the schedule
        ctx = context_of(layout)
        draws = dropout_draws(config, layout.schedule, ctx)
        model, record = build(subject, ctx), Record()
        model.engine.loss_scale = LossScale(LOSS_SCALE)  # must not change any result
        weights = _copies(model)
        found = Findings(
            coordinates={name: ctx.axis(name).rank for name in ("tp", "cp", "pp", "dp")},
            tied=set(model.tied),
            copied={
                entry.name
                for entry in model.entries()
                if entry.spec.shard and any(entry.spec.shard.replicated(ctx.tp_size))
            },
            names=set(weights),
            draws=draws,
            initial=parameter_distances(weights, expected.initial, model),
        )
        logits, found.labelled = _evaluated(model, micro_batches_of(layout.dp))
        if logits is not None and expected.logits is not None:
            whole = expected.logits
            found.logits = relative((logits - whole).norm(), whole.norm())
        optimizer = make_optimizer(subject.optimizer, model, layout)
        training = _train(subject, model, layout, steps, record, micro_batches_of(layout.dp))
        steps_of_one = zip(expected.gradients, expected.weights, strict=True)
        for loss, (theirs, stepped) in zip(training, steps_of_one, strict=True):
            found.losses.append(loss)
            found.auxiliary.append(_auxiliary(model))
            ours = gradients_of(model)
            ranges = optimizer.ranges if layout.zero else None
            found.gradients.append(parameter_distances(ours, theirs, model, ranges))
            if len(found.losses) == 1:
                found.factors = gradient_factors(ours, theirs, model, ranges)
                backwards = dict(reversed(found.gradients[0].items()))
                wrong = _first_differing(backwards, tolerance, ctx)
                if wrong and not layout.zero:  # under which a gradient is whole on no rank
                    found.gradient_clues = gradient_clues(ours, theirs, model, wrong)
            found.norms.append(optimizer.step().item())
            found.weights.append(parameter_distances(_copies(model), stepped, model))
        found.generators = record.generators
        for ours, whole in zip(record.activations, expected.activations, strict=True):
            known = activation_distances(model, ours, whole)
            distances = {key: known[key] for key in whole if key in known}  # as computed
            wrong = _first_differing(distances, tolerance, ctx)
            found.activations.append(distances)
            found.activation_clues.append(activation_clues(model, ours, whole, wrong))
        overflows = all_gather_objects(bool(optimizer.entries), ctx)[-1]
        skipped = skips_overflow(model, optimizer)
        found.skipped = skipped if overflows else None
    return found


def _generator_states() -> dict[str, bytes]:
    """Return the states of the process-wide random generators."""
    return {
        "Python's random": pickle.dumps(random.getstate()),
        "numpy.random": pickle.dumps(np.random.get_state()),
        "torch's default generator": torch.get_rng_state().numpy().tobytes(),
    }


def _first_differing(distances: dict, tolerance: float, ctx: ParallelContext) -> set:
    """Return the keys of the first distances above the tolerance, combined from all ranks."""
    mine = [key for key, distance in distances.items() if distance > tolerance]
    return {key for keys in all_gather_objects(mine[:CLUES], ctx) for key in keys}


def _evaluated(model, micro_batches: int) -> tuple[torch.Tensor | None, int]:
    """Return the logits of the first batch's first rows (None if this rank does not have them), and
    the number of labelled tokens in the mean loss of the batch."""
    batch = make_batch(0, model.config.vocab_size, model.longest_sequence(model.config))
    with torch.no_grad():
        logits = model(batch["input_ids"][: ROWS // 4]).logits
        batch = {name: own_rows(tensor, model.ctx) for name, tensor in batch.items()}
        _, labelled = model.eval_batch(**batch, num_microbatches=micro_batches, return_count=True)
    return logits, round(labelled.item())


def _losses_of_rows(model) -> torch.Tensor:
    """Return the sum of losses and the number of labelled tokens per row of the first batch: [rows,
    2]."""
    batch = make_batch(0, model.config.vocab_size, model.longest_sequence(model.config))
    scores = score(model, batch["input_ids"], shifted(batch["labels"]))
    return torch.stack([-scores.log_likelihood, scores.tokens.double()], dim=1)


def build(subject: Subject, ctx: ParallelContext):
    """Build the model with random biases, norms and adapters, and without dropout."""
    config, dtype = subject.config, getattr(torch, subject.dtype)
    if subject.load:
        model = from_pretrained(subject.load, ctx, dtype=dtype).train()
    else:
        model = from_config(config, ctx, dtype=dtype, seed=3)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.probability = 0.0
    if subject.lora_rank:
        lora.add(model, subject.lora_rank, alpha=subject.lora_rank, targets=subject.targets)
    for entry in in_memory(model, model.entries(), write=True):
        if entry.parameter.dim() == 1 or entry.spec.std == entry.spec.bound == 0:
            spec = replace(entry.spec, std=0.1)
            initialize(entry.parameter.data, spec, ctx, derive_seed(7, entry.name))
    return model


def reference_of(subject: Subject, model) -> Reference:
    """Return the loss of a check, with its reference: for preferences the model without adapters,
    if it has some; otherwise a model with other random weights."""
    loss = loss_named(subject.loss)
    without_adapters = subject.lora_rank and loss and "reference" in loss.needs

    def other():
        return distant_model(subject.config, model.ctx)

    return Reference(loss, model, None if without_adapters else other)


def distant_model(config: Any, ctx: ParallelContext):
    """Return a model with weights so large that its distributions are far from those of a new
    one."""
    model = from_config(config, ctx, seed=4)
    for entry in in_memory(model, model.entries(), write=True):
        entry.parameter.data.mul_(4)
    return model


def _train(
    subject: Subject, model, layout: Layout, steps: int, record: Record, micro_batches: int
) -> Iterator[float]:
    """Yield the loss of each step. The caller then runs the optimizer step.

    When a loss is yielded, gradients are those of the backward pass, not clipped. The activations
    of the first steps are added to `record`.
    """
    config = model.config
    longest, reference = model.longest_sequence(config), reference_of(subject, model)
    together = reference.loss.rows_together if reference.loss else 1
    for step in range(steps):
        batch = make_batch(step, config.vocab_size, longest, together)
        batch = {name: own_rows(tensor, model.ctx) for name, tensor in batch.items()}
        named = reference(batch, micro_batches)
        with (
            _recording(model, record, len(batch["input_ids"]))
            if step < len(KINDS)
            else nullcontext()
        ):
            loss = model.train_batch(
                **batch,
                **named,
                loss=reference.loss,
                num_microbatches=micro_batches,
                schedule=layout.schedule,
                step=step,
            )
        yield loss.item()


def _auxiliary(model) -> dict[str, float]:
    """Return the auxiliary losses of the last batch, by name."""
    return {name: mean.item() for name, mean in model.engine.auxiliary_losses.items()}


def _copies(model) -> dict[str, torch.Tensor]:
    """Copy the parameters by global name."""
    entries = in_memory(model, model.entries())
    return {entry.name: entry.parameter.detach().clone() for entry in entries}


@contextmanager
def _recording(model, record: Record, rows: int):
    """Within this block, record the inputs and outputs of modules (added to `record.activations` at
    the end), and the random generators that they use. rows: of the batch; tensors of another length
    are omitted."""
    handles, kept, states = [], {}, [_generator_states()]

    def drawn(name: str, before: dict[str, bytes]) -> None:
        for generator, state in _generator_states().items():
            if state != before[generator]:
                record.generators.setdefault(generator, name)

    def keep(kind: str, name: str, value) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
            kept.setdefault((kind, name), []).append(value.detach().clone())

    def watch(name: str, module: torch.nn.Module) -> None:
        def before(_, given, named):
            states.append(_generator_states())
            keep("input", name, next(iter((*given, *named.values())), None))

        def after(_, given, returned):
            drawn(name, states.pop())
            keep("output", name, returned)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))

    for name, module in model.named_modules():
        # An adapter's output can be a partial sum. The projections around an Attend are watched.
        if not is_adapter(f"{name}.") and not isinstance(module, Attend):
            watch(name, module)
    try:
        yield
        drawn("", states[0])
    finally:
        for handle in handles:
            handle.remove()
        alike = {
            key: torch.cat(parts)  # skip modules that are called with different shapes
            for key, parts in kept.items()
            if len({part.shape[1:] for part in parts}) == 1
        }
        found = {key: whole for key, whole in alike.items() if len(whole) == rows}
        record.activations.append(found)
