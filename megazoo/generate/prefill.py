"""Prompts go through the stages in pieces, and what all of them begin with goes through once."""

from collections import deque
from typing import NamedTuple

import torch

PIECE = 2048  # tokens of a row that go through the stages together, at most
TOKENS = 4096  # and of all rows
SHARED = 16  # tokens that several rows begin with: fewer are not worth a forward of their own


class PromptChunk(NamedTuple):
    """Tokens of the prompts that go through the stages together, as MicroBatch has them: input_ids
    and positions int64 [rows, tokens], segments of the tokens before, too. One row stands for all
    where it is of what they begin with."""

    input_ids: torch.Tensor
    positions: torch.Tensor | None
    segments: torch.Tensor | None


class Prefix(NamedTuple):
    """What all rows begin with. input_ids: int64 [1, tokens], without padding. padding: int64
    [rows], the tokens of each row that are before it. places: how many of each row's tokens,
    padding included, need no forward of their rows; of rows with more padding than others, the
    last tokens of the prefix are beyond."""

    input_ids: torch.Tensor
    padding: torch.Tensor
    places: int


def shared_prefix(input_ids: torch.Tensor, real: torch.Tensor | None) -> Prefix | None:
    """Return the tokens that all rows begin with, without the last token of any; None where they
    are too few, or there is one row.

    input_ids: int64 [rows, tokens]; real: which of them are not padding, bool, or None for all.
    """
    rows, tokens = input_ids.shape
    if rows < 2 or tokens <= SHARED:
        return None
    number = torch.arange(tokens, device=input_ids.device)
    padding = number.new_zeros(rows) if real is None else (~real).sum(dim=1)
    if real is not None and not bool((real == (number >= padding[:, None])).all()):
        return None  # some padding is not on the left
    aligned = input_ids.gather(1, (number + padding[:, None]).clamp(max=tokens - 1))
    same = (aligned == aligned[:1]).all(dim=0)
    shared = min(int(same.long().cumprod(dim=0).sum()), tokens - int(padding.max()) - 1)
    if shared < SHARED:
        return None
    return Prefix(aligned[:1, :shared], padding, shared + int(padding.min()))


def pieces_of(
    input_ids: torch.Tensor,
    positions: torch.Tensor | None,
    segments: torch.Tensor | None,
    prefix: Prefix | None,
) -> deque[PromptChunk]:
    """Return the pieces of prompts, those of the prefix first. All are int64 [rows, tokens]."""
    pieces, begin = deque(), 0
    if prefix is not None:
        begin = prefix.places
        for first, last in _ends(0, *reversed(prefix.input_ids.shape)):
            pieces.append(PromptChunk(prefix.input_ids[:, first:last], None, None))
    for first, last in _ends(begin, *reversed(input_ids.shape)):
        own = None if positions is None else positions[:, first:last]
        seen = None if segments is None else segments[:, :last]
        pieces.append(PromptChunk(input_ids[:, first:last], own, seen))
    return pieces


def _ends(begin: int, end: int, rows: int) -> list[tuple[int, int]]:
    """Return where pieces begin and end: about as many tokens each."""
    most = max(1, min(PIECE, TOKENS // rows))
    count = -(-(end - begin) // most)
    size = -(-(end - begin) // count)
    return [(first, min(first + size, end)) for first in range(begin, end, size)]
