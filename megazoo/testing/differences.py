"""Find, on one rank, how far a model is from a reference: its logits, what its modules are given
and return, and its weights, each beside the rank's part of the reference's."""

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
from megazoo.testing.distances import gradients_of, parameter_distances
from megazoo.testing.parts import part_of
from megazoo.testing.reference import Reference, with_rows


@dataclass
class Difference:
    """How far a tensor of ours is from the reference's.

    distance: the largest. rows: of ours, of a weight those that differ, of an activation the
    features that differ by more than the tolerance. token: the first that does.
    """

    distance: float = 0.0
    rows: set[int] = field(default_factory=set)
    token: float = math.inf

    def joined(self, other: "Difference") -> "Difference":
        """Return the difference of the tensor that two ranks have parts of."""
        return Difference(
            max(self.distance, other.distance),
            self.rows | other.rows,
            min(self.token, other.token),
        )


@dataclass
class Findings:
    """What one rank found: its loss, how its logits differ (None without the last stage), and its
    activations and weights, each under its key in the Reference. gradients: the distances of those
    of its parts of the parameters, over the whole gradients' norms."""

    loss: float
    logits: Difference | None = None
    activations: dict[tuple[str, str], Difference] = field(default_factory=dict)
    weights: dict[str, Difference] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)


def find_differences(model: Any, reference: Reference, tolerance: float) -> Findings:
    """Run the model on the reference's batch, and compare what this rank has."""
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
        for entry in model.entries()
        if entry.name in reference.weights
    }
    if reference.gradients:
        with without_dropout(model), warnings.catch_warnings():
            warnings.simplefilter("ignore", Advice)  # of training without dropout
            for out in model.microbatches(reference.input_ids, **batch):  # train_batch has dropout
                out.loss.backward()
        found.gradients = parameter_distances(gradients_of(model), reference.gradients, model)
    return found


def _difference_of_weight(entry: NamedParameter, whole: torch.Tensor, ctx) -> Difference:
    """Compare this rank's part of a weight with that of the whole one."""
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
    """Within this block compare what this rank's modules are given and return, as they run."""
    found, rows, heads = {}, len(reference.input_ids), _heads_of_norms(model)

    def look(kind: str, name: str, module, value) -> None:
        value = value[0] if isinstance(value, tuple) and value else value
        whole = reference.activations.get((kind, name))
        if whole is None or not isinstance(value, torch.Tensor):
            return
        ours, dim = with_rows(value.detach(), rows), 1 if kind == "input" else 0
        places = _places(whole)
        if name in heads and places.dim() == 4:  # each head is normalised alone
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
    """Return which heads this rank has, by the names of the norms of queries and of keys. Several
    ranks may have the same head of keys."""
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
    """Until the stack closes, call look(kind, name, module, value) with what a module is given and
    returns."""

    def before(_, given):
        look("input", name, module, given)

    def after(_, given, returned):
        look("output", name, module, returned)

    if hasattr(module, "project"):  # of queries, keys and values, which attention calls itself
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
    """Compare an activation of ours with those values of the whole one that are at these places."""
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
    """Return the place of each value of a tensor, in its shape."""
    return torch.arange(whole.numel()).view(whole.shape)


def largest(x: torch.Tensor) -> float:
    """Return the largest absolute value; 0 of nothing."""
    return float(x.abs().max()) if x.numel() else 0.0
