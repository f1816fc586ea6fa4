"""What hides tokens from each other in attention: masks of segments, and documents that are packed
one after the other."""

from typing import NamedTuple

import torch

# What is added to a score that does not count. exp makes it 0, as it does of -inf; but where a
# kernel looks at a block of keys that are all hidden before it sees others, -inf may give NaN:
# torch has put this number in its place for cuDNN (attention.cpp, convert_boolean_attn_mask_cudnn).
HIDDEN = -65504.0
ROW = 64  # elements: the length of a mask's rows in memory is a multiple of it


class Packed(NamedTuple):
    """Documents one after the other, in all rows of a micro-batch together.

    boundaries: int32 [documents + 1], the first token of each and the end of the last. Documents at
    the end may be empty. longest: tokens of the longest document at most.
    """

    boundaries: torch.Tensor
    longest: int


def segment_mask(segments: torch.Tensor | None, queries: int | None = None) -> torch.Tensor | None:
    """Return where a query may look: at itself and backwards, within its segment. bool [batch, 1,
    queries, sequence].

    segments: int64 [batch, sequence], one number for each segment; None, where there is one, gives
    None. queries: how many of the last tokens look, the others being in a KVCache; all by default.
    """
    if segments is None:
        return None
    earlier = segments.shape[1] - (queries or segments.shape[1])
    same = segments[:, earlier:, None] == segments[:, None, :]
    return same.tril(earlier)[:, None]


def in_aligned_rows(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return new memory for a mask of this shape whose rows begin at multiples of ROW elements.

    CUDA's kernels read rows that begin at multiples of 16. Of other masks torch makes a copy, in
    every layer.
    """
    *sizes, keys = shape
    return torch.empty(*sizes, keys + -keys % ROW, dtype=dtype, device=device)[..., :keys]


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what does, added to the scores, as a boolean mask does: 0 where a query may look, and
    HIDDEN where not. The same shape.

    torch would make it in every layer, and keep each layer's for backward.
    """
    added = in_aligned_rows(mask.shape, dtype, mask.device)
    return added.fill_(HIDDEN).masked_fill_(mask, 0.0)
