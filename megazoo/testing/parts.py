"""Tell which part of a module's whole input or output a rank has."""

from typing import Any

import torch

from megazoo.parallel.context import ParallelContext
from megazoo.parallel.sequence import SequenceCut, padded_length


def part_of(
    whole: torch.Tensor, ours: torch.Tensor, module: Any, dim: int, ctx: ParallelContext
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a module's input (dim 1) or output (dim 0) on this rank, and the part of the whole
    that it should be, without the padding that the ranks need to share a sequence.

    whole: of one process, [rows, sequence, features] or [rows, sequence, heads, head size]. ours:
    what the rank has. The part is all, the rank's part of the sequence, or the features that
    dimension `dim` of the module's weight is of. None if that can't be told.
    """
    if whole.shape == ours.shape:
        return ours, whole
    if whole.dim() not in (3, 4) or whole.dim() != ours.dim():
        return None
    part, features = whole.flatten(2), ours.shape[2:].numel()
    if part.shape[2] != features:
        part = _features_of_rank(part, module, dim, ctx)
    if part is None and whole.dim() == 4 and whole.shape[2] == ours.shape[2] * ctx.tp_size:
        # heads that are normalised each alone: the weight doesn't say how they are cut
        part = whole.chunk(ctx.tp_size, dim=2)[ctx.tp_rank].flatten(2)
    if part is None or part.shape[2] != features:
        return None
    places = _places_of_rank(part.shape[1], ours.shape[1], ctx)
    if places is None:
        return None
    there = places < part.shape[1]
    return ours.flatten(2)[:, there], part[:, places[there]]


def _places_of_rank(length: int, tokens: int, ctx: ParallelContext) -> torch.Tensor | None:
    """Return where in a sequence of `length` the rank's tokens are, [tokens]; beyond it those that
    are padding. None if a rank never has so many."""
    padded = padded_length(length, ctx)
    cut = SequenceCut.of(padded, ctx)
    places = torch.arange(padded) if cut is None else cut.positions(torch.device("cpu"))
    if ctx.sequence_parallel and tokens * ctx.tp_size == len(places):
        places = places.chunk(ctx.tp_size)[ctx.tp_rank]
    return places if len(places) == tokens else None


def _features_of_rank(
    whole: torch.Tensor, module, dim: int, ctx: ParallelContext
) -> torch.Tensor | None:
    """Return the features of `whole`, [rows, sequence, features], that the rank's part of dimension
    `dim` of a module's weight is of; None if that dimension isn't cut, or is of something else."""
    owner = getattr(module, "owner", module)  # of a head that is tied
    spec = getattr(owner, "specs", {}).get("weight")
    if not spec or not spec.shard:
        return None
    dim = min(dim, len(spec.shape) - 1)  # the weight of a norm has one dimension, for both
    if spec.shard.dim != dim or spec.shape[dim] != whole.shape[2]:
        return None
    pieces = sorted(spec.pieces(ctx.place), key=lambda piece: piece.offset[dim])
    return torch.cat([whole[..., slice(*piece.box[dim])] for piece in pieces], dim=-1)
