"""Find which part of a module's full input or output a rank has."""

from typing import Any

import torch

from megazoo.parallel.context import ParallelContext
from megazoo.parallel.sequence import SequenceCut, padded_length


def part_of(
    whole: torch.Tensor, ours: torch.Tensor, module: Any, dim: int, ctx: ParallelContext
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a module's input or output on this rank (`ours`), and the matching part of the full
    tensor (`whole`), without sequence padding. None if the part is unknown.

    The part can be the full tensor, the rank's part of the sequence, or the features of the rank's
    shard of the weight. `whole` is [rows, sequence, features] or [rows, sequence, heads, head
    size]. `dim` is the dimension of the weight: 1 for an input, 0 for an output.
    """
    if whole.shape == ours.shape:
        return ours, whole
    if whole.dim() not in (3, 4) or whole.dim() != ours.dim():
        return None
    part, features = whole.flatten(2), ours.shape[2:].numel()
    if part.shape[2] != features:
        part = _features_of_rank(part, module, dim, ctx)
    if part is None and whole.dim() == 4 and whole.shape[2] == ours.shape[2] * ctx.tp_size:
        # heads that are normalised separately: the weight has no dimension for heads
        part = whole.chunk(ctx.tp_size, dim=2)[ctx.tp_rank].flatten(2)
    if part is None or part.shape[2] != features:
        return None
    places = _places_of_rank(part.shape[1], ours.shape[1], ctx)
    if places is None:
        return None
    there = places < part.shape[1]
    return ours.flatten(2)[:, there], part[:, places[there]]


def _places_of_rank(length: int, tokens: int, ctx: ParallelContext) -> torch.Tensor | None:
    """Return the positions of the rank's tokens, [tokens]. Positions from `length` on are padding.
    None if a rank cannot have this number of tokens."""
    padded = padded_length(length, ctx)
    cut = SequenceCut.of(padded, ctx)
    places = torch.arange(padded) if cut is None else cut.positions(torch.device("cpu"))
    if ctx.sequence_parallel and tokens * ctx.tp_size == len(places):
        places = places.chunk(ctx.tp_size)[ctx.tp_rank]
    return places if len(places) == tokens else None


def _features_of_rank(
    whole: torch.Tensor, module, dim: int, ctx: ParallelContext
) -> torch.Tensor | None:
    """Return the features of `whole` [rows, sequence, features] that match the rank's shard of the
    module's weight in dimension `dim`. None if that dimension is not sharded or has another
    size."""
    owner = getattr(module, "owner", module)  # a tied head uses the embedding's weight
    spec = getattr(owner, "specs", {}).get("weight")
    if not spec or not spec.shard:
        return None
    dim = min(dim, len(spec.shape) - 1)  # a norm's weight has one dimension for inputs and outputs
    if spec.shard.dim != dim or spec.shape[dim] != whole.shape[2]:
        return None
    pieces = sorted(spec.pieces(ctx.place), key=lambda piece: piece.offset[dim])
    return torch.cat([whole[..., slice(*piece.box[dim])] for piece in pieces], dim=-1)
