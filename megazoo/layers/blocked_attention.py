"""Attention of short sequences in bfloat16 on CPUs: see attend.py.

torch's kernel multiplies blocks that are too small for a CPU's bfloat16 instructions. Batched
products of larger blocks take less time, for fewer than MANY keys.
"""

import math

import torch

from megazoo.layers.masks import HIDDEN, additive
from megazoo.parallel.cpu.products import attends_by_products
from megazoo.torch_internals import factors_are_bfloat16, softmax_backward

BLOCK = 128  # queries
FEWEST, MANY = 32, 768  # queries and keys: the kernel uses larger blocks for 768 queries or more
ELEMENTS = 1 << 19  # of the scores of a piece: 2 MB in fp32, which fits into a CPU's cache


def takes_blocks(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, dropout: float
) -> bool:
    """Return whether blocked_attention computes this attention, faster than the kernel of torch."""
    if dropout or (mask is not None and mask.requires_grad):
        return False
    if mask is None and q.shape[2] != k.shape[2]:
        return False
    fits = q.numel() > 0 and q.shape[2] >= FEWEST and k.shape[2] < MANY
    return fits and attends_by_products(q)


def blocked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Return softmax(q k^T * scale + mask) v: [batch, heads, queries, head_size].

    Same as: plain_attention.plain_attention. The scores and the softmax are fp32. Only the
    arguments are saved: backward computes the weights again, piece by piece.

    Args:
        q, k, v, scale: as in plain_attention.
        mask: as in plain_attention, with four dimensions. A query that no key is visible to gets a
            finite result.
    """
    if mask is not None and mask.dtype == torch.bool:
        mask = additive(mask, torch.float32)
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
                y[rows, :, queries] = of_queries.view_as(y[rows, :, queries])
        return y

    @staticmethod
    def backward(ctx, grad_output):
        q, k, v, mask = ctx.saved_tensors
        q_grad, k_grad, v_grad = map(_empty_like, (q, k, v))
        weights_of = _Weights(q, k, mask, ctx.scale)
        sums = k.new_empty(2, *k[weights_of.rows[0]].shape, dtype=torch.float32)
        for rows in weights_of.rows:
            k_sum, v_sum = sums[:, : len(k[rows])].zero_()
            for queries, keys in weights_of.blocks:
                weights = weights_of(rows, queries, keys)
                of_y = _of_groups(grad_output[rows, :, queries], k)
                v_sum[:, :, keys] += (weights.mT @ of_y).view_as(v[rows, :, keys])
                of_weights = of_y @ _flat(v[rows, :, keys]).mT
                of_scores = softmax_backward(of_weights, weights)
                of_keys = of_scores.mT @ _of_groups(q[rows, :, queries], k)
                k_sum[:, :, keys] += of_keys.view_as(k[rows, :, keys])
                of_queries = of_scores @ _flat(k[rows, :, keys])
                of_queries = of_queries.view_as(q[rows, :, queries])
                torch.mul(of_queries, ctx.scale, out=q_grad[rows, :, queries])
            k_grad[rows], v_grad[rows] = k_sum.mul_(ctx.scale), v_sum
        return q_grad, k_grad, v_grad, None, None


class _Weights:
    """softmax(q k^T * scale + mask) of some rows and queries, one after the other in the same
    memory.

    rows: the ranges of rows that fit into it. blocks: the ranges of queries, and of the keys that
    they may attend to.
    """

    def __init__(self, q, k, mask: torch.Tensor | None, scale: float):
        self.q, self.k, self.mask, self.scale = q, k, mask, scale
        (batch, heads, queries, _), keys = q.shape, k.shape[2]
        firsts = range(0, queries, BLOCK)
        blocks = [slice(first, min(first + BLOCK, queries)) for first in firsts]
        self.blocks = [(block, _keys_of(block, keys, mask)) for block in blocks]
        longest = heads * min(BLOCK, queries) * keys
        step = min(max(1, ELEMENTS // longest), batch)
        self.rows = [slice(first, min(first + step, batch)) for first in range(0, batch, step)]
        self._scores = q.new_empty(step * longest, dtype=torch.float32)
        self._rounded = q.new_empty(step * longest)
        self._shared = {}  # what is added to the scores of a block, if all rows share it
        if mask is None or len(mask) == 1:
            self._shared = {block[0].start: self._added(slice(1), *block) for block in self.blocks}

    def __call__(self, rows: slice, queries: slice, keys: slice) -> torch.Tensor:
        """Return the weights, [rows x key-value heads, queries of a group, keys]."""
        of_queries, of_keys = (x.float() for x in (self.q[rows, :, queries], self.k[rows, :, keys]))
        shape = (*of_queries.shape[:3], of_keys.shape[2])
        added = self._shared.get(queries.start)
        added = self._added(rows, queries, keys) if added is None else added
        scores = self._scores[: math.prod(shape)].view(shape).copy_(added)
        scores = _of_groups(scores, self.k)
        with factors_are_bfloat16():
            scores.baddbmm_(_of_groups(of_queries, self.k), _flat(of_keys).mT, alpha=self.scale)
        torch.softmax(scores, -1, out=scores)
        return self._rounded[: scores.numel()].view_as(scores).copy_(scores)

    def _added(self, rows: slice, queries: slice, keys: slice) -> torch.Tensor:
        """Return what is added to the scores, fp32."""
        if self.mask is None:
            hidden = torch.full((queries.stop - queries.start, keys.stop), HIDDEN)
            return hidden.triu_(1 + queries.start)
        mask = self.mask if len(self.mask) == 1 else self.mask[rows]
        mask = mask if mask.shape[2] == 1 else mask[:, :, queries]
        return mask[..., keys].float().clamp_(min=HIDDEN)


def _keys_of(queries: slice, keys: int, mask: torch.Tensor | None) -> slice:
    """Return the range of the keys that any of these queries may attend to."""
    if mask is None:
        return slice(0, queries.stop)
    mask = mask if mask.shape[2] == 1 else mask[:, :, queries]
    seen = (mask > HIDDEN).flatten(0, 2).any(0).expand(keys).nonzero()[:, 0].tolist()
    return slice(seen[0], seen[-1] + 1) if seen else slice(0, keys)


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
