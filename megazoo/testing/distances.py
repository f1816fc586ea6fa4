"""Measure how far a rank's tensors are from its shards of one process's tensors, and find patterns
in the differences: a factor, a missing sum over ranks, or another order."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.context import ParallelContext
from megazoo.testing.parts import part_of

UNEXPLAINED = 0.01  # fraction of a difference that a clue may leave unexplained


@dataclass(frozen=True)
class Clue:
    """A pattern in a tensor that differs from the expected one.

    Attributes:
        factor: The tensor is this multiple of the expected one; nan if it is not a multiple.
        sums: Axes along which the ranks' tensors add up to a multiple of the expected one, and that
            multiple.
        everywhere: The difference is the same at every token.
        reordered: The values are the expected ones in another order.
    """

    factor: float = math.nan
    sums: dict[str, float] = field(default_factory=dict)
    everywhere: bool = False
    reordered: bool = False


def relative(distance: torch.Tensor | float, size: torch.Tensor | float) -> float:
    """Return a distance divided by the expected size; inf if the result is nan."""
    value = float(distance) / max(float(size), 1e-30)
    return math.inf if math.isnan(value) else value


def own_rows(tensor: torch.Tensor, ctx: ParallelContext) -> torch.Tensor:
    """Return this replica's rows of the global batch."""
    return tensor.chunk(ctx.dp_size)[ctx.dp_rank]


def parameter_pairs(
    tensors: dict, expected: dict, model: Any, ranges: dict[str, tuple[int, int]] | None = None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the name, the actual and the expected values of each parameter in both dictionaries.

    Args:
        tensors: This rank's shards, keyed by parameter name.
        expected: The full tensors, keyed by parameter name.
        model: The model.
        ranges: With ZeRO-1, the elements (first, last + 1) of this rank's flattened shard that it
            has.

    Yields:
        The name, and this rank's actual and expected values, flat and in double precision.
    """
    ctx = model.ctx
    for entry in model.entries():
        if entry.name not in expected or entry.name not in tensors:
            continue
        pieces, whole = entry.spec.pieces(ctx.place), expected[entry.name]
        boxes = [tuple(slice(*bounds) for bounds in piece.box) for piece in pieces]
        there = torch.ones_like(tensors[entry.name], dtype=torch.bool)
        if ranges is not None:
            places = torch.arange(there.numel()).view_as(there)
            first, end = ranges[entry.name]
            there = (places >= first) & (places < end)
        chosen = torch.cat([there[piece.index()].flatten() for piece in pieces])
        ours = torch.cat([tensors[entry.name][piece.index()].flatten() for piece in pieces])
        theirs = torch.cat([whole[box].flatten() for box in boxes])
        yield entry.name, ours[chosen].double(), theirs[chosen].double()


def parameter_distances(
    tensors: dict, expected: dict, model: Any, ranges: dict | None = None
) -> dict[str, float]:
    """Return the distance of this rank's shard of each parameter from the expected one.

    Distances are divided by the full tensor's norm, or by a thousandth of the global norm if that
    is larger. For the arguments see `parameter_pairs`.
    """
    norms = {name: tensor.double().norm() for name, tensor in expected.items()}
    least = 1e-3 * torch.stack(list(norms.values())).norm()
    return {
        name: relative((ours - theirs).norm(), max(norms[name], least))
        for name, ours, theirs in parameter_pairs(tensors, expected, model, ranges)
    }


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of trained parameters by global name. Missing gradients, and elements
    that only other replicas have, are zeros, so that they are compared."""
    buckets, gradients = model.engine.gradients.buckets, {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter, dtype=torch.float32)
                if buckets.has(parameter):
                    place = buckets.range_of(parameter, buckets.axis_of(parameter).rank)
                    gradient.view(-1)[slice(*place)] = buckets.own(parameter)
            gradients[name] = gradient
    return gradients


def gradient_factors(
    gradients: dict, expected: dict, model: Any, ranges: dict | None = None
) -> dict[str, float]:
    """Return the factor between each gradient on this rank and the expected one; nan if it is not a
    multiple."""
    return {
        name: _factor(ours, theirs, UNEXPLAINED * ours.norm())
        for name, ours, theirs in parameter_pairs(gradients, expected, model, ranges)
        if theirs.norm() > 1e-6
    }


def activation_pairs(
    model: Any, ours: dict, expected: dict
) -> Iterator[tuple[tuple[str, str], torch.Tensor, torch.Tensor]]:
    """Yield this rank's inputs and outputs of modules in a step, and its shards of those in one
    process.

    Activations for which the shard is unknown are skipped (see part_of).

    Yields:
        The key ("input" or "output", module), the actual and the expected values.
    """
    for name, module in model.named_modules():
        for kind, dim in (("input", 1), ("output", 0)):
            mine, whole = ours.get((kind, name)), expected.get((kind, name))
            if mine is None or whole is None:
                continue
            rows = own_rows(whole, model.ctx)
            parts = part_of(rows, mine, module, dim, model.ctx) if len(mine) == len(rows) else None
            if parts is not None:
                yield (kind, name), *parts


def activation_distances(model: Any, ours: dict, expected: dict) -> dict[tuple[str, str], float]:
    """Return the distances of this rank's activations in a step from its shards of those in one
    process."""
    return {
        key: relative((mine - part).norm(), part.norm())
        for key, mine, part in activation_pairs(model, ours, expected)
    }


def activation_clues(
    model: Any, ours: dict, expected: dict, keys: set
) -> dict[tuple[str, str], Clue]:
    """Return clues for the activations with the given keys. All tp ranks call this together with
    the same keys."""
    clues = {}
    for key, mine, part in activation_pairs(model, ours, expected):
        if key in keys:
            whole = mine.shape == own_rows(expected[key], model.ctx).shape
            groups = {"tp": model.ctx.tp_group} if whole else {}
            sums = _sums(_without_bias(mine), _without_bias(part), groups)
            clues[key] = _clue(mine, part, sums)
    return clues


def gradient_clues(gradients: dict, expected: dict, model: Any, names: set) -> dict[str, Clue]:
    """Return clues for the gradients of the named parameters. All ranks call this together with the
    same names."""
    ctx, specs = model.ctx, {entry.name: entry.spec for entry in model.entries()}
    clues = {}
    for name, ours, theirs in parameter_pairs(gradients, expected, model):
        if name in names:
            groups = {"tp": ctx.tp_group} if specs[name].shard is None else {}
            if specs[name].replicas(ctx) is ctx.token_axis:  # otherwise other shards
                groups |= {"cp": ctx.cp_group, "dp": ctx.dp_group}
            clues[name] = _clue(ours, theirs, _sums(ours, theirs, groups))
    return clues


def _without_bias(x: torch.Tensor) -> torch.Tensor:
    """Return activations minus their mean over tokens. A bias that is added on each rank before a
    sum changes only the mean."""
    return x - x.flatten(0, -2).mean(dim=0)


def _sums(ours: torch.Tensor, theirs: torch.Tensor, groups: dict) -> dict[str, float]:
    """Return the axes along which the ranks' tensors add up to a multiple of the expected one, and
    that multiple."""
    found, left = {}, UNEXPLAINED * (ours - theirs).norm()
    for axis, group in groups.items():
        if group is not None and group.size() > 1:
            total = ours.clone()
            all_reduce(total, group)
            factor = _factor(total, theirs, left)
            found |= {} if math.isnan(factor) else {axis: factor}
    return found


def _clue(ours: torch.Tensor, theirs: torch.Tensor, sums: dict[str, float]) -> Clue:
    difference = (ours - theirs).double()
    left, everywhere = UNEXPLAINED * difference.norm(), False
    if difference.dim() > 1 and difference.shape[-1] > 1:  # and everything else is as expected
        rest = UNEXPLAINED * _without_bias(theirs).norm()
        everywhere = bool(_without_bias(difference).norm() <= min(left, rest))
    a, b = (x.flatten().double().sort().values for x in (ours, theirs))
    reordered = bool((a - b).norm() <= left)
    return Clue(_factor(ours, theirs, left), sums, everywhere, reordered)


def _factor(ours: torch.Tensor, theirs: torch.Tensor, left: torch.Tensor) -> float:
    """Return the factor by which the expected tensor differs, or nan if more than `left` remains
    unexplained."""
    ours, theirs = ours.flatten().double(), theirs.flatten().double()
    factor = relative(ours @ theirs, theirs @ theirs)
    return factor if (ours - factor * theirs).norm() <= left else math.nan
