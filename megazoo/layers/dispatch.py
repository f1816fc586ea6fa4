"""Send each token to the ranks of its experts, and the results back, without dropping tokens.

The experts are sharded over the axis "ep", which is folded into dp x cp (see
megazoo/parallel/context.py). Rows are sorted by expert, exchanged in one all-to-all with uneven
splits, and multiplied group by group.
"""

import torch

from megazoo.parallel.collectives import exchange_parts
from megazoo.parallel.compile import untraced
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.regions import exchange
from megazoo.parallel.shard import Shard

AXIS = "ep"  # the axis over which experts are sharded


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, back, copies):
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx, grad):
        (back,) = ctx.saved_tensors
        grad = grad.index_select(0, back)
        if ctx.copies > 1:
            grad = grad.unflatten(0, (-1, ctx.copies)).sum(1)
        return grad, None, None, None


@untraced
def take_rows(
    x: torch.Tensor, order: torch.Tensor, back: torch.Tensor, copies: int = 1
) -> torch.Tensor:
    """Return the rows of x, each `copies` times, in another order: [rows, ...] -> [rows x copies,
    ...].

    Same as: x.repeat_interleave(copies, 0)[order]. The backward adds copies in a fixed order.

    Args:
        x: [rows, ...].
        order: a permutation, int64 [rows x copies].
        back: the inverse permutation.
        copies: of each row.
    """
    return _TakeRows.apply(x, order, back, copies)


class Dispatch:
    """The ways of the rows of one batch of tokens to their experts, and back.

    Every rank along ep creates one, and calls its methods in the same order. On the meta device the
    tokens are assumed to be spread evenly.

    Args:
        chosen: the experts of each token, int64 [tokens, k].
        experts: number of experts over all ranks.
        ctx: parallel context.

    Attributes:
        counts: number of rows of each expert of this rank, int64 [experts of this rank].
    """

    def __init__(self, chosen: torch.Tensor, experts: int, ctx: ParallelContext):
        rows = chosen.flatten()
        self.copies = chosen.shape[-1]
        self.order, self.back = _sorted(rows)
        self.counts = rows.new_zeros(experts).scatter_add_(0, rows, torch.ones_like(rows))
        axis = ctx.folded.get(AXIS)
        self.axis = None
        if axis is None or axis.size == 1:
            return
        self.axis = axis
        ranks, own, group = axis.size, experts // axis.size, axis.group
        assert group  # there are several ranks
        leaving = self.counts.view(ranks, own)
        arriving = exchange_parts(leaving, group, [1] * ranks, [1] * ranks)
        self.sends, self.receives = _sizes(leaving, arriving, len(rows))
        self.counts = arriving.sum(0)
        # the received rows are in the order of the ranks, and of each rank in that of the experts
        expert = torch.arange(own, device=rows.device).repeat(ranks)
        total = sum(self.receives)
        if not rows.is_meta:
            expert = expert.repeat_interleave(arriving.flatten(), output_size=total)
        else:
            expert = expert.new_empty(total)
        self.by_expert, self.by_rank = _sorted(expert)

    def send(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of this rank's experts, expert by expert: [tokens, size] -> [sum of
        counts, size]."""
        x = take_rows(x, self.order, self.back, self.copies)
        if self.axis is None:
            return x
        x = exchange(x, self.axis, self.sends, self.receives)
        return take_rows(x, self.by_expert, self.by_rank)

    def take_back(self, y: torch.Tensor) -> torch.Tensor:
        """Return the results of the experts of each token of this rank: [sum of counts, size] ->
        [tokens, k, size]."""
        if self.axis is not None:
            y = take_rows(y, self.by_rank, self.by_expert)
            y = exchange(y, self.axis, self.receives, self.sends)
        return take_rows(y, self.back, self.order).unflatten(0, (-1, self.copies))


def _sorted(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the permutation that sorts keys, equal ones in their order, and its inverse."""
    order = keys.argsort(stable=True)
    places = torch.arange(len(order), device=order.device)
    return order, torch.empty_like(order).scatter_(0, order, places)


def _sizes(leaving: torch.Tensor, arriving: torch.Tensor, rows: int) -> list[list[int]]:
    """Return the rows to and from each rank, on the host. leaving, arriving: [ranks, experts].
    rows: of this rank; on the meta device they are spread evenly."""
    if not leaving.is_meta:
        return torch.stack([leaving.sum(1), arriving.sum(1)]).tolist()
    return [Shard(0, (rows,)).sizes_of_ranks(len(leaving))] * 2
