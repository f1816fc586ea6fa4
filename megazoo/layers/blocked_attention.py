"""Attention of short sequences in bfloat16 on CPUs: see attend.py.

torch's kernel multiplies blocks that are too small for a CPU's bfloat16 instructions, except for
768 queries or more. Batched products of larger blocks take less time.
"""

import math

import torch
from torch.autograd.function import once_differentiable

from megazoo.layers.masks import HIDDEN
from megazoo.parallel.cpu.products import attends_by_products
from megazoo.torch_internals import factors_are_bfloat16, softmax_backward

BLOCK = 128  # queries
FEWEST, MANY = 32, 768  # queries; queries or keys
# Scores that are computed at a time, or those of one row if they are more: 2 MB, for a CPU's cache.
ELEMENTS = 1 << 19


def takes_blocks(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, dropout: float
) -> bool:
    """Return whether blocked_attention supports this attention, and is faster than the kernel of
    torch."""
    if dropout or (mask is not None and mask.requires_grad):
        return False
    if mask is None and q.shape[2] != k.shape[2]:
        return False
    fits = q.shape[2] >= FEWEST and max(q.shape[2], k.shape[2]) < MANY
    return fits and q.numel() > 0 and attends_by_products(q)


def blocked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Return softmax(q k^T * scale + mask) v: [batch, heads, queries, head_size].

    Same as: plain_attention.plain_attention. The scores and the softmax are fp32. Only the
    arguments are saved: backward computes the weights again, rows by rows.

    Args:
        q, k, v, scale: as in plain_attention. A value has the size of a key.
        mask: as in plain_attention, with four dimensions. If all keys are hidden from a query, its
            result is finite, but has no meaning.
    """
    return _BlockedAttention.apply(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, scale):
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale = scale
        y, weights_of = _empty_like(q), _Weights(q, k, mask, scale)
        for rows in weights_of.rows:
            for queries, keys in weights_of.blocks:
                of_queries = weights_of(rows, queries, keys) @ _flat(v[rows, :, keys])
                here = y[rows, :, queries]
                here.copy_(of_queries.view_as(here))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        q, k, v, mask = ctx.saved_tensors
        q_grad, k_grad, v_grad = map(_empty_like, (q, k, v))
        weights_of = _Weights(q, k, mask, ctx.scale)
        sums = k.new_empty(2, *k[weights_of.rows[0]].shape, dtype=torch.float32)
        for rows in weights_of.rows:
            k_sum, v_sum = sums[:, : len(k[rows])].zero_()
            for queries, keys in weights_of.blocks:
                of_keys, of_values = k[rows, :, keys], v[rows, :, keys]
                weights = weights_of(rows, queries, keys)
                of_y = _of_groups(grad_output[rows, :, queries], k)
                v_sum[:, :, keys] += (weights.mT @ of_y).view_as(of_values)
                of_scores = softmax_backward(of_y @ _flat(of_values).mT, weights)
                of_queries = _of_groups(q[rows, :, queries], k)
                k_sum[:, :, keys] += (of_scores.mT @ of_queries).view_as(of_keys)
                here = q_grad[rows, :, queries]
                torch.mul((of_scores @ _flat(of_keys)).view_as(here), ctx.scale, out=here)
            k_grad[rows], v_grad[rows] = k_sum.mul_(ctx.scale), v_sum
        return q_grad, k_grad, v_grad, None, None


class _Weights:
    """softmax(q k^T * scale + mask) of some rows and queries at a time, in the same memory.

    rows: the ranges of rows that fit into it. blocks: the ranges of queries, and of the keys that
    they may attend to.
    """

    def __init__(self, q, k, mask: torch.Tensor | None, scale: float):
        self.q, self.k, self.mask, self.scale = q, k, mask, scale
        (batch, heads, queries, _), keys = q.shape, k.shape[2]
        self.blocks = [(block, _keys_of(block, keys, mask)) for block in _slices(queries, BLOCK)]
        of_row = heads * min(BLOCK, queries) * keys
        rows = min(max(1, ELEMENTS // of_row), batch)
        self.rows = _slices(batch, rows)
        self._scores = q.new_empty(rows * of_row, dtype=torch.float32)
        self._rounded = q.new_empty(rows * of_row)
        # what is added to the scores, if all rows share it
        self._shared: dict[int, torch.Tensor] = {}

    def __call__(self, rows: slice, queries: slice, keys: slice) -> torch.Tensor:
        """Return the weights, [rows x key-value heads, queries of a group, keys]."""
        of_queries, of_keys = (x.float() for x in (self.q[rows, :, queries], self.k[rows, :, keys]))
        shape = (*of_queries.shape[:3], of_keys.shape[2])
        scores = self._scores[: math.prod(shape)].view(shape)
        scores.copy_(self._added(rows, queries, keys))
        scores = _of_groups(scores, self.k)
        with factors_are_bfloat16():
            scores.baddbmm_(_of_groups(of_queries, self.k), _flat(of_keys).mT, alpha=self.scale)
        torch.softmax(scores, -1, out=scores)
        return self._rounded[: scores.numel()].view_as(scores).copy_(scores)

    def _added(self, rows: slice, queries: slice, keys: slice) -> torch.Tensor:
        """Return what is added to the scores, fp32. It is kept if other rows need it, and it is not
        large."""
        if queries.start in self._shared:
            return self._shared[queries.start]
        if self.mask is None:
            added = torch.full((queries.stop - queries.start, keys.stop), HIDDEN)
            added.triu_(1 + queries.start)
        else:
            added = _additive(_cut(self.mask, rows, slice(None), queries, keys))
        if self.mask is None or (len(self.mask) == 1 and self.mask.numel() <= ELEMENTS):
            self._shared[queries.start] = added
        return added


def _additive(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask as it is added to the scores: finite, fp32, in new memory."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape).masked_fill_(~mask, HIDDEN)
    return mask.float().clamp(min=HIDDEN)


def _keys_of(queries: slice, keys: int, mask: torch.Tensor | None) -> slice:
    """Return the range of the keys that any of these queries may attend to."""
    if mask is None:
        return slice(0, queries.stop)
    mask = _cut(mask, slice(None), slice(None), queries, slice(None))
    visible = mask if mask.dtype == torch.bool else mask > HIDDEN
    seen = visible.flatten(0, 2).any(0).expand(keys).nonzero()[:, 0].tolist()
    return slice(seen[0], seen[-1] + 1) if seen else slice(0, keys)


def _cut(mask: torch.Tensor, *ranges: slice) -> torch.Tensor:
    """Return these ranges of a mask. A dimension of size 1 has the same values for all."""
    sizes = zip(ranges, mask.shape, strict=True)
    return mask[tuple(each if size > 1 else slice(None) for each, size in sizes)]


def _slices(total: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, total)) for first in range(0, total, step)]


def _flat(x: torch.Tensor) -> torch.Tensor:
    """[rows, heads, ...] as [rows x heads, ...]."""
    return x.flatten(0, 1)


def _of_groups(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[rows, heads, queries, ...] as [rows x key-value heads, queries of a group, ...]. The query
    heads of a group attend to the same keys, so they are further queries of one head."""
    return x.reshape(len(x) * k.shape[1], -1, x.shape[-1])


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    """Return memory for [batch, heads, sequence, size] in which the heads of a token are
    together."""
    batch, heads, sequence, size = x.shape
    return x.new_empty(batch, sequence, heads, size).transpose(1, 2)
