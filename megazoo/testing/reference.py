"""Run a reference, and keep what a model of ours is compared with: its logits and loss, what its
modules were given and returned, and its weights, all in the order of our rows."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megazoo.errors import UserError
from megazoo.layers.cross_entropy import IGNORE_INDEX
from megazoo.models.hugging_face.names import HFNames, Run, names_in
from megazoo.parallel.context import ParallelContext


@dataclass(frozen=True)
class Twin:
    """The modules of a reference that make what one module of ours makes.

    parts: their names, and which rows of our weight each has. labels: what the parts of ours are
    called, and how many rows each has; none if it has no parts. transposed: as in HFNames.
    """

    parts: list[tuple[str, list[Run]]]
    labels: list[tuple[str, int]]
    transposed: bool

    def theirs(self, row: int) -> tuple[str, int]:
        """Return the module of the reference that has a row of ours, and which row it is there."""
        for name, runs in self.parts:
            for run in runs:
                if 0 <= row - run.ours < run.count:
                    return name, row - run.ours + run.theirs
        raise IndexError(row)

    def label(self, row: int) -> str:
        """Return what the part is called that a row of ours is in: q, k or v, say; or nothing."""
        for name, count in self.labels:
            if row < count:
                return name
            row -= count
        return ""

    def joined(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Make one tensor of those of the parts, whose last dimension is their rows."""
        if len(self.parts) == len(self.parts[0][1]) == 1:
            return tensors[0]
        sizes = [sum(run.count for run in runs) for _, runs in self.parts]
        whole = tensors[0].new_empty(*tensors[0].shape[:-1], sum(sizes))
        for (name, runs), tensor, size in zip(self.parts, tensors, sizes, strict=True):
            if tensor.shape[-1] != size:
                raise UserError(f"{name} of the reference has {tensor.shape[-1]} rows, not {size}")
            for run in runs:
                rows = tensor.narrow(-1, run.theirs, run.count)
                whole.narrow(-1, run.ours, run.count).copy_(rows)
        return whole


@dataclass
class Reference:
    """What a reference made of a batch.

    input_ids, attention_mask: the batch, int64 [rows, sequence]. logits: [rows, sequence,
    vocabulary]. twins: by our modules' global names. activations: ("input" or "output", global name
    of our module) -> what its twin was given or returned, in the order of the forward. weights: by
    our global names. has_all_weights: whether each parameter of ours is among them. gradients: of
    the loss, fp32, by the names of the weights; none if they were not asked for.
    """

    name: str
    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    logits: torch.Tensor
    twins: dict[str, Twin] = field(default_factory=dict)
    activations: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    has_all_weights: bool = False
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def labels(self) -> torch.Tensor:
        """The labels of the loss: the ids, without what is padding or is predicted from it."""
        if self.attention_mask is None:
            return self.input_ids
        seen = self.attention_mask.bool()
        return self.input_ids.masked_fill(~(seen & seen.roll(1, dims=1)), IGNORE_INDEX)

    @property
    def loss(self) -> float:
        """The mean of the cross-entropy over the labels, each predicted from the token before."""
        return float(self.loss_of(self.logits.double()))

    def loss_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return that mean of some logits, [rows, sequence, vocabulary]."""
        labels = self.labels[:, 1:].flatten().to(logits.device)
        logits = logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)

    def seen(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a tensor [rows, sequence, ...] with 0 where the batch is padding."""
        if self.attention_mask is None:
            return whole
        hidden = ~self.attention_mask.bool()
        return whole.masked_fill(hidden.view(*hidden.shape, *[1] * (whole.dim() - 2)), 0.0)


def run_reference(
    reference: Callable,
    family: type,
    config: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    names: dict | None = None,
    gradients: bool = False,
) -> Reference:
    """Call a reference with a batch, and keep what it makes of it.

    family, config: of our model. names, and the rest: see `megazoo.testing.compare`. gradients:
    keep those of the loss, too, if the reference is a module.
    """
    more = {} if attention_mask is None else {"attention_mask": attention_mask}
    name = getattr(reference, "__name__", type(reference).__name__)
    mask = None if attention_mask is None else attention_mask.cpu()
    made = Reference(name, input_ids.cpu(), mask, torch.empty(0))
    ours: Any = None
    theirs: dict[str, torch.Tensor] = {}
    if isinstance(reference, nn.Module):
        if any(module.training for module in reference.modules()):
            raise UserError("the reference is in training mode: call its eval() first")
        ours = family.on_meta(config, ParallelContext())
        table = family.HUGGING_FACE_NAMES if names is None else names
        made.twins = _twins(ours, reference, table)
        theirs |= reference.named_parameters(remove_duplicate=False)
        made.weights = _by_our_names(theirs, ours, made.twins)
        made.has_all_weights = len(made.weights) == len(list(ours.entries()))
    gradients = gradients and bool(made.weights)
    with _watching(reference, made.twins) as kept, torch.set_grad_enabled(gradients):
        logits = reference(input_ids, **more)
    logits = getattr(logits, "logits", logits)
    shape = (*input_ids.shape, config.vocab_size)
    if not isinstance(logits, torch.Tensor) or logits.shape != shape:
        found = list(getattr(logits, "shape", ())) or type(logits).__name__
        raise UserError(f"the reference returned {found} instead of logits {list(shape)}")
    made.logits = logits.detach().cpu()
    if not made.seen(made.logits).isfinite().all():
        raise UserError("the reference returned logits that are not finite")
    made.activations = _activations(kept, made.twins, len(input_ids))
    if gradients:
        trained = {name: each for name, each in theirs.items() if each.requires_grad}
        loss = made.loss_of(logits.float())
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        of_theirs = {
            name: torch.zeros_like(each) if gradient is None else gradient
            for (name, each), gradient in zip(trained.items(), found, strict=True)
        }
        made.gradients = _by_our_names(of_theirs, ours, made.twins)
    return made


def _twins(ours: nn.Module, reference: nn.Module, names: dict) -> dict[str, Twin]:
    """Return the twin of each module of ours whose modules the reference has all."""
    table = {}
    for name, theirs in names.items():
        theirs = (theirs,) if isinstance(theirs, str) else theirs
        table[name] = theirs if isinstance(theirs, HFNames) else HFNames(*theirs)
    there, twins = dict(reference.named_modules(remove_duplicate=False)), {}
    # GPT-NeoX' head has another name in files than in the model
    head = getattr(reference, "get_output_embeddings", lambda: None)()
    for name, module in ours.named_modules():
        theirs = names_in(table, name)
        if name == "head" and head is not None:
            theirs = HFNames(next(known for known, each in there.items() if each is head))
        if theirs is None or not there.keys() >= set(theirs.names):
            continue
        spec: Any = getattr(module, "specs", {}).get("weight")
        parts = getattr(module, "part_names", ())
        if theirs.grouped or len(theirs.names) > 1:
            runs = theirs.parts(spec)
        else:
            runs = [(theirs.names[0], [Run(0, 0, sys.maxsize)])]
        labels = list(zip(parts, spec.shard.parts, strict=True)) if parts else []
        twins[name] = Twin(runs, labels, theirs.transposed)
    return twins


def _by_our_names(
    theirs: dict[str, torch.Tensor], ours: Any, twins: dict
) -> dict[str, torch.Tensor]:
    """Return the reference's parameters, or their gradients, of each parameter of ours whose module
    has a twin. theirs: by their names."""
    weights = {}
    for entry in ours.entries():
        module, _, kind = entry.name.rpartition(".")
        names = [f"{name}.{kind}" for name, _ in twins[module].parts] if module in twins else []
        if not names or not theirs.keys() >= set(names):
            continue
        tensors = [theirs[name].detach().cpu() for name in names]
        if not (twins[module].transposed and kind == "weight"):
            tensors = [tensor.movedim(0, -1) for tensor in tensors]
        whole = twins[module].joined(tensors).movedim(-1, 0)
        if whole.shape != entry.spec.shape:
            raise UserError(
                f"{names[0]} of the reference is {list(whole.shape)}, and {entry.name} of the "
                f"model {list(entry.spec.shape)}"
            )
        weights[entry.name] = whole.contiguous()
    return weights


@contextmanager
def _watching(reference: Any, twins: dict) -> Iterator[dict]:
    """Within this block keep what the twins' modules are given and return: ("input" or "output",
    their name) -> tensor, in the order of the forward."""
    kept, handles = {}, []

    def keep(kind: str, name: str, value) -> None:
        value = value[0] if isinstance(value, tuple) and value else value
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            kept[kind, name] = value.detach().to("cpu", copy=True)

    def watch(name: str, module: nn.Module) -> None:
        def before(_, given):
            keep("input", name, given)

        def after(_, given, returned):
            keep("output", name, returned)

        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after))

    for name in {name for twin in twins.values() for name, _ in twin.parts}:
        watch(name, reference.get_submodule(name))
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _activations(kept: dict, twins: dict, rows: int) -> dict[tuple[str, str], torch.Tensor]:
    """Return what the twins as wholes were given and returned, in the order of the forward."""
    order, found = {key: number for number, key in enumerate(kept)}, []
    for name, twin in twins.items():
        for kind in ("input", "output"):
            keys = [(kind, part) for part, _ in twin.parts]
            if not kept.keys() >= set(keys):
                continue
            last = max(order[key] for key in keys) if kind == "output" else order[keys[0]]
            tensors = [kept[key] for key in keys]
            whole = tensors[0] if kind == "input" else twin.joined(tensors)
            found.append((last, (kind, name), with_rows(whole, rows)))
    return {key: tensor for _, key, tensor in sorted(found, key=lambda each: each[0])}


def with_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return an activation that is the same for all rows of a batch, such as that of positions,
    with so many: [sequence, features] or [1, sequence, features] -> [rows, sequence, features]."""
    x = x[None] if x.dim() == 2 else x
    return x.expand(rows, *x.shape[1:]) if len(x) == 1 else x
