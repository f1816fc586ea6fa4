"""What hides tokens from each other in attention: masks of segments, and documents that are packed
one after the other."""

from typing import NamedTuple

import torch

from megazoo.parallel.sequence import SequenceCut

# What is added to a score that does not count. exp makes it 0, as it does of -inf; but where a
# kernel looks at a block of keys that are all hidden before it sees others, -inf may give NaN:
# torch has put this number in its place for cuDNN (attention.cpp, convert_boolean_attn_mask_cudnn).
HIDDEN = -65504.0
ROW = 64  # elements: the length of a mask's rows in memory is a multiple of it


class Packed(NamedTuple):
    """Documents one after the other, in all rows of a micro-batch together.

    boundaries: int32 [documents + 1], the first query of each and the end of the last. Documents
    may have none. longest: a bound on the queries of a document. key_boundaries, longest_of_keys:
    the same of the keys, if there are more of them; a document's queries are then the last of its
    tokens. None where every token is a query.
    """

    boundaries: torch.Tensor
    longest: int
    key_boundaries: torch.Tensor | None = None
    longest_of_keys: int | None = None


class Shifted(NamedTuple):
    """A causal mask for queries that are the last of the keys, kept as one row: the mask of each
    query is a part of it, which begins one element before that of the query before.

    row: [queries + keys - 1]. queries: how many.
    """

    row: torch.Tensor
    queries: int

    def of_flipped(self) -> torch.Tensor:
        """Return the mask for the queries in the reverse order, the last one first: [1, 1, queries,
        keys], without memory of its own."""
        keys = len(self.row) - self.queries + 1
        return self.row.as_strided((1, 1, self.queries, keys), (0, 0, 1, 1))


class MaskPerWindow(NamedTuple):
    """The masks for layers that see different stretches of the tokens before them: one for each
    attention's `window`, which hides what is farther back, too."""

    masks: dict[int | None, "torch.Tensor | Packed | MaskPerChunk | None"]


class MaskPerChunk(NamedTuple):
    """The masks for a sequence that is cut over context-parallel ranks: one for each run of queries
    in `SequenceCut.queries`, over all keys up to its end. None stands for a causal mask where each
    key is a query's, too."""

    masks: tuple[torch.Tensor | Packed | Shifted | None, ...]


def segment_mask(
    segments: torch.Tensor | None, queries: int | None = None, window: int | None = None
) -> torch.Tensor | None:
    """Return where a query may look: at itself and backwards, within its segment. bool [batch, 1,
    queries, sequence].

    segments: int64 [batch, sequence], one number for each segment; None, where there is one, gives
    None. queries: how many of the last tokens look, the others being in a KVCache; all by default.
    window: how many tokens a query looks at, itself included; all by default.
    """
    if segments is None:
        return None
    earlier = segments.shape[1] - (queries or segments.shape[1])
    same = segments[:, earlier:, None] == segments[:, None, :]
    seen = same.tril(earlier)
    return (seen if window is None else seen.triu(earlier + 1 - window))[:, None]


def window_mask(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
    """Return where a query may look that sees itself and the window - 1 tokens before it, queries
    being the last of the keys: bool [1, 1, queries, keys]."""
    one_segment = torch.zeros(1, keys, dtype=torch.int64, device=device)
    mask = segment_mask(one_segment, queries, window)
    assert mask is not None
    return mask


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


def masks_of_chunks(
    cut: SequenceCut,
    rows: int,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    segments: torch.Tensor | None = None,
    boundaries: torch.Tensor | None = None,
    packed: bool = False,
    window: int | None = None,
) -> MaskPerChunk:
    """Return the masks of a causal attention over a sequence that is cut, of so many rows.

    segments: of the whole sequences, int64 [rows, sequence]; None where there is one. boundaries:
    of the documents that they are, as in Packed, if they are known. packed: the attention takes
    masks that are Packed. dtype: of what is added to the scores; None for boolean masks. window: as
    in segment_mask; what is Packed says nothing of it.
    """
    if packed and (device.type == "meta" or not rows):  # no kernel looks at them, or takes no rows
        return MaskPerChunk((None,) * len(cut.queries))
    if packed and (segments is None or boundaries is not None):
        if boundaries is None:
            boundaries = torch.arange(rows + 1, device=device) * cut.length
        return MaskPerChunk(
            tuple(_packed_of(boundaries, cut.length, chunk) for chunk in cut.queries)
        )
    masks = [_mask_of_chunk(segments, chunk, device, window) for chunk in cut.queries]
    return MaskPerChunk(tuple(_ready(mask, dtype) for mask in masks))


def _ready(mask: torch.Tensor | Shifted | None, dtype: torch.dtype | None):
    """Return a boolean mask of a chunk as its attention takes it. Only the CPU's kernel reads rows
    that begin anywhere without a copy."""
    if isinstance(mask, Shifted):
        if dtype is not None and mask.row.device.type == "cpu":
            return Shifted(additive(mask.row, dtype), mask.queries)
        mask = mask.of_flipped().flip(2)
    return mask if mask is None or dtype is None else additive(mask, dtype)


def _mask_of_chunk(
    segments: torch.Tensor | None, chunk: range, device: torch.device, window: int | None
) -> torch.Tensor | Shifted | None:
    """Return where the tokens of a chunk may look, among the keys up to its end: bool [rows or 1,
    1, chunk, keys]. None where that is all before them."""
    if segments is not None:
        return segment_mask(segments[:, : chunk.stop], len(chunk), window)
    if chunk.start == 0 and (window is None or chunk.stop <= window):
        return None
    row = torch.arange(len(chunk) + chunk.stop - 1, device=device)
    seen = row < chunk.stop
    return Shifted(seen if window is None else seen & (row >= chunk.stop - window), len(chunk))


def _packed_of(boundaries: torch.Tensor, length: int, chunk: range) -> Packed:
    """Return the documents of a chunk of rows of this length: of queries what is in the chunk, and
    of keys what is before its end. boundaries: of all documents of all rows, [documents + 1]."""
    row, place = boundaries // length, boundaries % length
    queries = row * len(chunk) + (place - chunk.start).clamp(0, len(chunk))
    keys = row * chunk.stop + place.clamp(max=chunk.stop)
    return Packed(queries.int(), len(chunk), keys.int(), chunk.stop)
