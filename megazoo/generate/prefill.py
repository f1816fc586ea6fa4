"""Run the prompts through the stages in pieces, and their common prefix only once."""

from collections import deque
from typing import NamedTuple

import torch

PIECE = 2048  # maximum number of tokens per row in a piece
TOKENS = 4096  # maximum number over all rows
SHARED = 16  # minimum number of common tokens: fewer are not worth a separate forward


class PromptChunk(NamedTuple):
    """Tokens of the prompts that pass through the stages together, as in MicroBatch: input_ids and
    positions int64 [rows, tokens], segments including earlier tokens. A common prefix has one row.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor | None
    segments: torch.Tensor | None


class Prefix(NamedTuple):
    """The common prefix of all rows.

    input_ids: int64 [1, tokens], without padding. padding: int64 [rows], the number of padding
    tokens before it in each row. places: the number of tokens per row, including padding, that need
    no forward of their row. In rows with more padding than others, the last tokens of the prefix
    are beyond it.
    """

    input_ids: torch.Tensor
    padding: torch.Tensor
    places: int


def shared_prefix(input_ids: torch.Tensor, real: torch.Tensor | None) -> Prefix | None:
    """Return the common prefix of all rows, without the last token of any. None if it is too short,
    or there is one row.

    input_ids: int64 [rows, tokens]. real: which of them are not padding, bool, or None for all.
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
    """Return the pieces of the prompts, those of the prefix first. All are int64 [rows, tokens]."""
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
    """Return the start and end of pieces with about the same number of tokens."""
    most = max(1, min(PIECE, TOKENS // rows))
    count = -(-(end - begin) // most)
    size = -(-(end - begin) // count)
    return [(first, min(first + size, end)) for first in range(begin, end, size)]
