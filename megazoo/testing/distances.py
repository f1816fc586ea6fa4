"""Measure how far a rank's tensors are from its parts of those of one process, and what is
noticeable about those that differ: a factor, a sum over ranks that is missing, another order."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.context import ParallelContext
from megazoo.testing.batches import ROWS
from megazoo.testing.parts import part_of

UNEXPLAINED = 0.01  # of a difference, which a clue may leave


@dataclass(frozen=True)
class Clue:
    """What is noticeable about a tensor that differs from the expected one.

    factor: it is the expected one times this; nan if it is no multiple. sums: of each axis along
    which the ranks' tensors add up to a multiple of the expected one, which multiple. everywhere:
    it differs by the same features at every token. reordered: it has the expected values in another
    order.
    """

    factor: float = math.nan
    sums: dict[str, float] = field(default_factory=dict)
    everywhere: bool = False
    reordered: bool = False


def relative(distance: torch.Tensor | float, size: torch.Tensor | float) -> float:
    """Return a distance over the size of what is expected; inf for nan."""
    value = float(distance) / max(float(size), 1e-30)
    return math.inf if math.isnan(value) else value


def own_rows(tensor: torch.Tensor, ctx: ParallelContext) -> torch.Tensor:
    """Return the rows of the global batch that are this replica's."""
    return tensor.chunk(ctx.dp_size)[ctx.dp_rank]


def parameter_pairs(
    tensors: dict, expected: dict, model: Any, ranges: dict[str, tuple[int, int]] | None = None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield, of each parameter that both have, its name, and what this rank has and should have,
    flat, in double precision.

    ranges: under ZeRO-1 the elements (first, last + 1) of this rank's flattened part that it has.
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
    """Return how far this rank's tensor of each parameter is from the expected one.

    The distance is over the whole tensor's norm, or over a thousandth of that of all together if
    that is more. ranges: as in parameter_pairs.
    """
    norms = {name: tensor.double().norm() for name, tensor in expected.items()}
    least = 1e-3 * torch.stack(list(norms.values())).norm()
    return {
        name: relative((ours - theirs).norm(), max(norms[name], least))
        for name, ours, theirs in parameter_pairs(tensors, expected, model, ranges)
    }


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the parameters that are trained, by global name; zeros for one that
    has got none, so that it is compared, too."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def gradient_factors(
    gradients: dict, expected: dict, model: Any, ranges: dict | None = None
) -> dict[str, float]:
    """Return, of each parameter, by what its expected gradient is multiplied on this rank; nan if
    it is no multiple."""
    return {
        name: _factor(ours, theirs, UNEXPLAINED * ours.norm())
        for name, ours, theirs in parameter_pairs(gradients, expected, model, ranges)
        if theirs.norm() > 1e-6
    }


def activation_pairs(
    model: Any, ours: dict, expected: dict
) -> Iterator[tuple[tuple[str, str], torch.Tensor, torch.Tensor]]:
    """Yield, of each module's input and output, ("input" or "output", name), what this rank has of
    a step, and its part of what one process had.

    What that part is can't always be told: see part_of.
    """
    for name, module in model.named_modules():
        for kind, dim in (("input", 1), ("output", 0)):
            mine, whole = ours.get((kind, name)), expected.get((kind, name))
            if mine is None or whole is None or len(whole) != ROWS:
                continue
            rows = own_rows(whole, model.ctx)
            parts = part_of(rows, mine, module, dim, model.ctx) if len(mine) == len(rows) else None
            if parts is not None:
                yield (kind, name), *parts


def activation_distances(model: Any, ours: dict, expected: dict) -> dict[tuple[str, str], float]:
    """Return how far this rank's activations of a step are from its part of those of one
    process."""
    return {
        key: relative((mine - part).norm(), part.norm())
        for key, mine, part in activation_pairs(model, ours, expected)
    }


def activation_clues(
    model: Any, ours: dict, expected: dict, keys: set
) -> dict[tuple[str, str], Clue]:
    """Return what is noticeable about some activations; the tp ranks call this together, with the
    same keys."""
    clues = {}
    for key, mine, part in activation_pairs(model, ours, expected):
        if key in keys:
            whole = mine.shape == own_rows(expected[key], model.ctx).shape
            groups = {"tp": model.ctx.tp_group} if whole else {}
            sums = _sums(_without_bias(mine), _without_bias(part), groups)
            clues[key] = _clue(mine, part, sums)
    return clues


def gradient_clues(gradients: dict, expected: dict, model: Any, names: set) -> dict[str, Clue]:
    """Return what is noticeable about the gradients of some parameters; all ranks call this
    together, with the same names."""
    ctx, specs = model.ctx, {entry.name: entry.spec for entry in model.entries()}
    clues = {}
    for name, ours, theirs in parameter_pairs(gradients, expected, model):
        if name in names:
            groups = {"tp": ctx.tp_group} if specs[name].shard is None else {}
            if specs[name].replicas(ctx) is ctx.token_axis:  # else ranks may have other parts
                groups |= {"cp": ctx.cp_group, "dp": ctx.dp_group}
            clues[name] = _clue(ours, theirs, _sums(ours, theirs, groups))
    return clues


def _without_bias(x: torch.Tensor) -> torch.Tensor:
    """Return activations without their mean over tokens, which a bias that is added to each part of
    a sum shifts."""
    return x - x.flatten(0, -2).mean(dim=0)


def _sums(ours: torch.Tensor, theirs: torch.Tensor, groups: dict) -> dict[str, float]:
    """Return of which groups of ranks the tensors add up to a multiple of the expected one, and of
    which."""
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
    if difference.dim() > 1 and difference.shape[-1] > 1:  # and the rest is as it should be
        rest = UNEXPLAINED * _without_bias(theirs).norm()
        everywhere = bool(_without_bias(difference).norm() <= min(left, rest))
    a, b = (x.flatten().double().sort().values for x in (ours, theirs))
    reordered = bool((a - b).norm() <= left)
    return Clue(_factor(ours, theirs, left), sums, everywhere, reordered)


def _factor(ours: torch.Tensor, theirs: torch.Tensor, left: torch.Tensor) -> float:
    """Return by what the expected tensor is to be multiplied to become this one, but for what may
    be left; nan if no number will do."""
    ours, theirs = ours.flatten().double(), theirs.flatten().double()
    factor = relative(ours @ theirs, theirs @ theirs)
    return factor if (ours - factor * theirs).norm() <= left else math.nan
