"""Shard a sequence over the context-parallel ranks, and restore it.

A sequence is split into 2 cp chunks of equal length. Rank r has chunk r followed by chunk 2 cp - 1
- r. With cp 2, rank 0 has chunks 0 and 3, and rank 1 has chunks 1 and 2. A token attends to the
tokens before it, so ranks with one early and one late chunk have equal work (Llama 3: Dubey et al.
2024).
"""

import math
from dataclasses import dataclass

import torch
from einops import rearrange

from megazoo.errors import UserError
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shares import share_of


def padded_length(length: int, ctx: ParallelContext) -> int:
    """Return the smallest length, at least `length`, that can be sharded: each cp rank gets two
    chunks of equal length. Under sequence parallelism each tp rank gets an equal share of them."""
    unit = ctx.tp_size if ctx.sequence_parallel else 1
    if ctx.cp_size > 1:
        unit = ctx.cp_size * math.lcm(2, unit)
    return length + -length % unit


@dataclass(frozen=True)
class SequenceCut:
    """The part of a sequence that one of `size` context-parallel ranks has.

    length: of the full sequence, in tokens. method: see CP_METHODS. Raises UserError if the length
    is not a multiple of 2 * size.
    """

    length: int
    size: int
    rank: int
    method: str

    def __post_init__(self):
        if self.length % (2 * self.size):
            raise UserError(
                f"a sequence of {self.length} tokens can't be split over cp {self.size}: pad it to "
                f"a multiple of {2 * self.size} tokens"
            )

    @classmethod
    def of(cls, length: int, ctx: ParallelContext) -> "SequenceCut | None":
        """Return this rank's SequenceCut for a sequence of a padded length, or None without context
        parallelism."""
        if ctx.cp_size == 1:
            return None
        return cls(length, ctx.cp_size, ctx.cp_rank, ctx.layout.cp_method)

    @property
    def chunks(self) -> tuple[range, range]:
        """The positions of this rank's two chunks in the whole sequence."""
        tokens = self.length // (2 * self.size)  # per chunk
        first, second = self.rank * tokens, (2 * self.size - 1 - self.rank) * tokens
        return range(first, first + tokens), range(second, second + tokens)

    @property
    def queries(self) -> tuple[range, ...]:
        """The ranges of tokens for which this rank computes attention, each over all keys up to its
        end: its two chunks, or with "ulysses" the whole sequence for some of the heads."""
        return (range(self.length),) if self.method == "ulysses" else self.chunks

    def heads(self, heads: range) -> range:
        """Return the part of a tp rank's query heads for which this rank computes attention."""
        if self.method != "ulysses":
            return heads
        return share_of(heads, self.size, self.rank)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part: [batch, sequence] -> [batch, sequence / size]."""
        return torch.cat([tensor[:, chunk.start : chunk.stop] for chunk in self.chunks], dim=1)

    def place(self, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Write this rank's part to its positions in `whole`, and return `whole`: the inverse of
        `own`."""
        for chunk, tokens in zip(self.chunks, part.chunk(2, dim=1), strict=True):
            whole[:, chunk.start : chunk.stop] = tokens
        return whole

    def local(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the indices in this rank's part of the tokens at `positions` of the sequence; -1
        for tokens of other ranks."""
        places = torch.full_like(positions, -1)
        for number, chunk in enumerate(self.chunks):
            here = (positions >= chunk.start) & (positions < chunk.stop)
            places = torch.where(here, positions - chunk.start + number * len(chunk), places)
        return places

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return the positions of this rank's tokens: int64 [sequence / size]."""
        return torch.cat([torch.arange(c.start, c.stop, device=device) for c in self.chunks])


def in_order(parts: torch.Tensor) -> torch.Tensor:
    """Put the ranks' parts into the order of the sequence: [ranks, ..., part, size] -> [...,
    sequence, size]."""
    first, second = parts.chunk(2, dim=-2)
    return torch.cat([*first, *reversed(second.unbind())], dim=-2)


def add_to_parts(parts: torch.Tensor, beginning: torch.Tensor) -> None:
    """Add the beginning of a sequence, a whole number of chunks, to the ranks' parts in place:
    [..., tokens, size] to [ranks, ..., part, size]."""
    ranks, chunks = len(parts), parts.unflatten(-2, (2, -1))
    for number, chunk in enumerate(beginning.split(chunks.shape[-2], dim=-2)):
        rank, half = (number, 0) if number < ranks else (2 * ranks - 1 - number, 1)
        chunks[rank].select(-3, half).add_(chunk)


def in_parts(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    """Split a sequence into the ranks' parts: [..., sequence, size] -> [ranks, ..., part, size]."""
    chunks = rearrange(whole, "... (chunks part) size -> chunks ... part size", chunks=2 * ranks)
    return torch.cat([chunks[:ranks], chunks[ranks:].flip(0)], dim=-2)
