"""Attention masks that hide tokens from each other: masks of segments, and packed documents."""

from typing import NamedTuple

import torch

from megazoo.parallel.sequence import SequenceCut

# The value that is added to the score of a hidden token. Like -inf, it gives exp(score) = 0. But
# -inf may give NaN if a kernel first reads a block of keys that are all hidden. torch uses the same
# value for cuDNN (attention.cpp, convert_boolean_attn_mask_cudnn).
HIDDEN = -65504.0
ROW = 64  # the memory of a row of a mask is a multiple of this number of elements


class Packed(NamedTuple):
    """Boundaries of documents that are packed one after the other, over all rows of a micro-batch.

    Attributes:
        boundaries: int32 [documents + 1], the first query of each document and the end of the last
            one. A document may have no queries.
        longest: upper bound on the number of queries of a document.
        key_boundaries: as boundaries, for the keys, if there are more keys than queries. The
            queries of a document are then its last tokens. None: every token is a query.
        longest_of_keys: upper bound on the number of keys of a document, or None.
    """

    boundaries: torch.Tensor
    longest: int
    key_boundaries: torch.Tensor | None = None
    longest_of_keys: int | None = None


class Paged(NamedTuple):
    """The keys of a cache that are in use, for one query per row: the first slots of each row.

    The memory of a row is one page of the cache. So a kernel reads only these keys, without a mask.

    Attributes:
        used: int32 [rows], the number of keys of each row.
        table: int32 [rows, 1], the page of each row.
        boundaries: int32 [rows + 1], the first query of each row and the end of the last one.
        slot_boundaries: int32 [rows + 1], the first slot of each row and the end of the last one.
    """

    used: torch.Tensor
    table: torch.Tensor
    boundaries: torch.Tensor
    slot_boundaries: torch.Tensor


class Shifted(NamedTuple):
    """A causal mask for queries that are the last of the keys, stored as one row.

    The mask of each query is a slice of the row that starts one element before that of the previous
    query. row: [queries + keys - 1]. queries: their number.
    """

    row: torch.Tensor
    queries: int

    def of_flipped(self) -> torch.Tensor:
        """Return the mask for the queries in reverse order, last one first, as a view: [1, 1,
        queries, keys]."""
        keys = len(self.row) - self.queries + 1
        return self.row.as_strided((1, 1, self.queries, keys), (0, 0, 1, 1))


class MaskPerWindow(NamedTuple):
    """Masks for layers with different windows: one for each value of an attention's `window`. Each
    mask also hides the tokens beyond its window."""

    masks: dict[int | None, "torch.Tensor | Packed | MaskPerChunk | None"]


class MaskPerChunk(NamedTuple):
    """Masks for a sequence that is split over context-parallel ranks.

    There is one mask for each run of queries in `SequenceCut.queries`, over all keys up to the end
    of the run. None: causal, with as many queries as keys.
    """

    masks: tuple[torch.Tensor | Packed | Shifted | None, ...]


def segment_mask(
    segments: torch.Tensor | None, queries: int | None = None, window: int | None = None
) -> torch.Tensor | None:
    """Return where queries may attend: within their segment, up to themselves.

    Args:
        segments: int64 [batch, sequence], the segment number of each token. None: one segment; the
            result is then None.
        queries: number of queries, which are the last tokens; the others are in a KVCache. Default:
            all.
        window: number of tokens that a query attends to, including itself; default: all.

    Returns:
        bool [batch, 1, queries, sequence], or None.
    """
    if segments is None:
        return None
    earlier = segments.shape[1] - (queries or segments.shape[1])
    same = segments[:, earlier:, None] == segments[:, None, :]
    seen = same.tril(earlier)
    return (seen if window is None else seen.triu(earlier + 1 - window))[:, None]


def window_mask(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
    """Return where queries may attend within a window that ends at themselves.

    Args:
        queries: number of queries, which are the last of the keys.
        keys: number of keys.
        window: number of tokens that a query attends to, including itself.
        device: device of the result.

    Returns:
        bool [1, 1, queries, keys].
    """
    one_segment = torch.zeros(1, keys, dtype=torch.int64, device=device)
    mask = segment_mask(one_segment, queries, window)
    assert mask is not None
    return mask


def in_aligned_rows(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return uninitialised memory for a mask whose rows start at multiples of ROW elements.

    CUDA kernels need rows that start at multiples of 16. torch copies other masks in every layer.
    """
    *sizes, keys = shape
    return torch.empty(*sizes, keys + -keys % ROW, dtype=dtype, device=device)[..., :keys]


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a boolean mask to an additive one: 0 where a query may attend, HIDDEN elsewhere.

    Otherwise torch would convert it in every layer, and save each result for backward.
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
    """Return the masks of a causal attention over a sequence that is split over cp ranks.

    Args:
        cut: how the sequence is split.
        rows: number of sequences.
        dtype: dtype of additive masks; None: boolean masks.
        device: device of the masks.
        segments: segment numbers of the full sequences, int64 [rows, sequence]; None: one segment.
        boundaries: the documents of the segments, as in Packed, if they are known.
        packed: whether the attention accepts Packed masks.
        window: as in segment_mask. A Packed mask does not contain it.
    """
    if packed and (device.type == "meta" or not rows):  # no kernel runs on these
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
    """Return the boolean mask of a chunk as its attention needs it. Only the CPU kernel reads rows
    with any start address without a copy."""
    if isinstance(mask, Shifted):
        if dtype is not None and mask.row.device.type == "cpu":
            return Shifted(additive(mask.row, dtype), mask.queries)
        mask = mask.of_flipped().flip(2)
    return mask if mask is None or dtype is None else additive(mask, dtype)


def _mask_of_chunk(
    segments: torch.Tensor | None, chunk: range, device: torch.device, window: int | None
) -> torch.Tensor | Shifted | None:
    """Return where the tokens of a chunk may attend, among the keys up to its end: bool [rows or 1,
    1, chunk, keys]. None: to all keys up to themselves."""
    if segments is not None:
        return segment_mask(segments[:, : chunk.stop], len(chunk), window)
    if chunk.start == 0 and (window is None or chunk.stop <= window):
        return None
    row = torch.arange(len(chunk) + chunk.stop - 1, device=device)
    seen = row < chunk.stop
    return Shifted(seen if window is None else seen & (row >= chunk.stop - window), len(chunk))


def _packed_of(boundaries: torch.Tensor, length: int, chunk: range) -> Packed:
    """Return the documents of a chunk of rows of this length: the queries within the chunk, and the
    keys before its end. boundaries: of all documents of all rows, [documents + 1]."""
    row, place = boundaries // length, boundaries % length
    queries = row * len(chunk) + (place - chunk.start).clamp(0, len(chunk))
    keys = row * chunk.stop + place.clamp(max=chunk.stop)
    return Packed(queries.int(), len(chunk), keys.int(), chunk.stop)
