"""Run a reference and store its logits, loss, module inputs and outputs, and weights. Rows are
stored in the order of megazoo's weights."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megazoo.constants import IGNORE_INDEX
from megazoo.errors import UserError
from megazoo.families.names import HFNames, Run, names_in
from megazoo.parallel.context import ParallelContext


@dataclass(frozen=True)
class Twin:
    """The modules of a reference that correspond to one module of the model.

    Attributes:
        parts: Their names, and the rows of the model's weight in each.
        labels: The names of the weight's parts and their numbers of rows; empty if it has no parts.
        transposed: As in HFNames.
    """

    parts: list[tuple[str, list[Run]]]
    labels: list[tuple[str, int]]
    transposed: bool

    def theirs(self, row: int) -> tuple[str, int]:
        """Return the reference's module that contains a row of the model's weight, and the row's
        number there."""
        for name, runs in self.parts:
            for run in runs:
                if 0 <= row - run.ours < run.count:
                    return name, row - run.ours + run.theirs
        raise IndexError(row)

    def label(self, row: int) -> str:
        """Return the name of the part that contains a row of the model's weight (such as q, k or
        v), or ""."""
        for name, count in self.labels:
            if row < count:
                return name
            row -= count
        return ""

    def joined(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Join the tensors of the parts. Rows are in the last dimension."""
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
    """The results of a reference on a batch.

    Attributes:
        name: Name of the reference.
        input_ids: int64 [rows, sequence].
        attention_mask: int64 [rows, sequence], or None.
        logits: [rows, sequence, vocabulary].
        twins: Twins by the global names of the model's modules.
        activations: Inputs and outputs of twins in the order of the forward pass, by ("input" or
            "output", global name of the model's module).
        weights: Weights by the global names of the model's parameters.
        has_all_weights: Whether `weights` contains every parameter of the model.
        gradients: Gradients of the loss by parameter name, fp32; empty if not requested.
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
        """The labels of the loss: input_ids, without padding and without tokens that are predicted
        from padding."""
        if self.attention_mask is None:
            return self.input_ids
        seen = self.attention_mask.bool()
        return self.input_ids.masked_fill(~(seen & seen.roll(1, dims=1)), IGNORE_INDEX)

    @property
    def loss(self) -> float:
        """The mean cross-entropy over the labels. Each token is predicted from the previous one."""
        return float(self.loss_of(self.logits.double()))

    def loss_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of logits [rows, sequence, vocabulary]."""
        labels = self.labels[:, 1:].flatten().to(logits.device)
        logits = logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)

    def seen(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a tensor [rows, sequence, ...] with zeros at padding."""
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
    """Run a reference on a batch and store its results.

    Args:
        reference: As in `megazoo.testing.compare`.
        family: Model class.
        config: Config of the model.
        input_ids: int64 [batch, sequence].
        attention_mask: int64 [batch, sequence], or None.
        names: As in `megazoo.testing.compare`.
        gradients: Store gradients of the loss too, if the reference is an nn.Module.
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
    """Return the twins of the model's modules. Modules without a complete twin are skipped."""
    table = {}
    for name, theirs in names.items():
        theirs = (theirs,) if isinstance(theirs, str) else theirs
        table[name] = theirs if isinstance(theirs, HFNames) else HFNames(*theirs)
    there, twins = dict(reference.named_modules(remove_duplicate=False)), {}
    # the head of GPT-NeoX has different names in files and in the model
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
    """Convert the reference's parameters or gradients from its names to the model's, for all
    modules with a twin."""
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
    """Within this block, store the inputs and outputs of the twins' modules in the order of the
    forward pass. Keys are ("input" or "output", the reference's module name)."""
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
    """Return the inputs and outputs of complete twins in the order of the forward pass."""
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
    """Expand an activation that is shared by all rows, such as that of positions: [sequence,
    features] or [1, sequence, features] -> [rows, sequence, features]."""
    x = x[None] if x.dim() == 2 else x
    return x.expand(rows, *x.shape[1:]) if len(x) == 1 else x
