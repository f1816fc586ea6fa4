"""Compare a model with a reference on one rank: logits, inputs and outputs of modules, and weights.
Each is compared with the rank's shard of the reference's."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest import mock

import torch

from megazoo.errors import Advice
from megazoo.layers import CausalSelfAttention
from megazoo.layers.dropout import without_dropout
from megazoo.parallel.module import NamedParameter
from megazoo.parallel.storage import in_memory
from megazoo.testing.distances import gradients_of, parameter_distances
from megazoo.testing.parts import part_of
from megazoo.testing.reference import Reference, with_rows


@dataclass
class Difference:
    """The difference between a tensor of the model and the reference's.

    Attributes:
        distance: Largest absolute difference.
        rows: For a weight, the rows that differ. For an activation, the features whose difference
            is above the tolerance.
        token: First token whose difference is above the tolerance, or inf.
    """

    distance: float = 0.0
    rows: set[int] = field(default_factory=set)
    token: float = math.inf

    def joined(self, other: "Difference") -> "Difference":
        """Combine the differences of two ranks' shards of a tensor."""
        return Difference(
            max(self.distance, other.distance),
            self.rows | other.rows,
            min(self.token, other.token),
        )


@dataclass
class Findings:
    """The differences on one rank.

    Attributes:
        loss: The loss.
        logits: Difference of the logits; None without the last stage.
        activations: Differences of activations, by their keys in the Reference.
        weights: Differences of weights, keyed by parameter name.
        gradients: Distances of the rank's shards of gradients, divided by the full gradients'
            norms.
    """

    loss: float
    logits: Difference | None = None
    activations: dict[tuple[str, str], Difference] = field(default_factory=dict)
    weights: dict[str, Difference] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)


def find_differences(model: Any, reference: Reference, tolerance: float) -> Findings:
    """Run the model on the reference's batch and compare this rank's shards."""
    batch = {"attention_mask": reference.attention_mask, "labels": reference.labels}
    with (
        torch.no_grad(),
        without_dropout(model),
        _comparing(model, reference, tolerance) as activations,
    ):
        out = model(reference.input_ids, **batch, return_logits=True)
    found = Findings(float(out.loss), activations=activations)
    if out.logits is not None:
        places = _places(out.logits)
        found.logits = _difference(out.logits, places, reference.logits, reference, tolerance)
    found.weights = {
        entry.name: _difference_of_weight(entry, reference.weights[entry.name], model.ctx)
        for entry in in_memory(model, model.entries())
        if entry.name in reference.weights
    }
    if reference.gradients:
        with without_dropout(model), warnings.catch_warnings():
            warnings.simplefilter("ignore", Advice)  # the advice about training without dropout
            # microbatches: train_batch would apply dropout
            for out in model.microbatches(reference.input_ids, **batch):
                out.loss.backward()
        found.gradients = parameter_distances(gradients_of(model), reference.gradients, model)
    return found


def _difference_of_weight(entry: NamedParameter, whole: torch.Tensor, ctx) -> Difference:
    """Compare this rank's shard of a weight with the full weight."""
    found = Difference()
    for piece in entry.spec.pieces(ctx.place):
        ours = entry.parameter.detach()[piece.index()].double().cpu()
        theirs = whole[tuple(slice(*bounds) for bounds in piece.box)].double()
        distance = (ours - theirs).abs().nan_to_num(math.inf).reshape(len(ours), -1)
        wrong = (distance > 0).any(dim=1).nonzero().flatten() + piece.box[0][0]
        found = found.joined(Difference(largest(distance), set(wrong.tolist())))
    return found


@contextmanager
def _comparing(
    model: Any, reference: Reference, tolerance: float
) -> Iterator[dict[tuple[str, str], Difference]]:
    """Within this block, compare the inputs and outputs of this rank's modules while they run."""
    found, rows, heads = {}, len(reference.input_ids), _heads_of_norms(model)

    def look(kind: str, name: str, module, value) -> None:
        value = value[0] if isinstance(value, tuple) and value else value
        whole = reference.activations.get((kind, name))
        if whole is None or not isinstance(value, torch.Tensor):
            return
        ours, dim = with_rows(value.detach(), rows), 1 if kind == "input" else 0
        places = _places(whole)
        if name in heads and places.dim() == 4:  # each head is normalised separately
            places = places[:, :, heads[name]]
        part = part_of(places, ours, module, dim, model.ctx)
        if part is not None:
            found[kind, name] = _difference(*part, whole, reference, tolerance)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name in reference.twins:
                _watch(stack, name, module, look)
        yield found


def _heads_of_norms(model: Any) -> dict[str, slice]:
    """Return this rank's heads by the names of the query and key norms. Several ranks can have the
    same key head."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, CausalSelfAttention):
            shard, size, first = module.qkv.shard, module.qkv.head_size, 0
            cuts = shard.cuts(model.ctx.tp_size, model.ctx.tp_rank)
            for norm, cut, features in zip(("q_norm", "k_norm"), cuts, shard.parts, strict=False):
                start = (cut.global_start - first) // size
                found[f"{name}.{norm}"] = slice(start, start + cut.length // size)
                first += features
    return found


def _watch(stack: ExitStack, name: str, module, look: Callable) -> None:
    """Call look(kind, name, module, value) with the inputs and outputs of a module until the stack
    closes."""

    def before(_, given):
        look("input", name, module, given)

    def after(_, given, returned):
        look("output", name, module, returned)

    if hasattr(module, "project"):  # the fused QKV projection: attention calls `project` directly
        project = module.project

        @wraps(project)
        def watched(x):
            look("input", name, module, x)
            y = project(x)
            look("output", name, module, y)
            return y

        stack.enter_context(mock.patch.object(module, "project", watched))
    for handle in (
        module.register_forward_pre_hook(before),
        module.register_forward_hook(after),
    ):
        stack.callback(handle.remove)


def _difference(
    ours: torch.Tensor,
    places: torch.Tensor,
    whole: torch.Tensor,
    reference: Reference,
    tolerance: float,
) -> Difference:
    """Compare an activation with the values of the full one at the given places."""
    whole = reference.seen(whole)
    features = whole[0, 0].numel()
    tokens = places // features
    distance = (ours.to(whole) - whole.flatten()[places]).abs().float().nan_to_num(math.inf)
    if reference.attention_mask is not None:
        distance = distance.masked_fill(~reference.attention_mask.bool().flatten()[tokens], 0.0)
    wrong = distance > tolerance * largest(whole)
    if not wrong.any():
        return Difference(largest(distance))
    rows = set((places[wrong] % features).unique().tolist())
    first = int((tokens[wrong] % whole.shape[1]).min())
    return Difference(largest(distance), rows, first)


def _places(whole: torch.Tensor) -> torch.Tensor:
    """Return the flat index of each value of a tensor, in the tensor's shape."""
    return torch.arange(whole.numel()).view(whole.shape)


def largest(x: torch.Tensor) -> float:
    """Return the largest absolute value; 0 if the tensor is empty."""
    return float(x.abs().max()) if x.numel() else 0.0
