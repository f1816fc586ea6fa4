"""Enter and leave parallel regions: pairs of collectives with autograd.

A sum in the forward pass is a copy in the backward pass, and the reverse (Megatron-LM: Shoeybi et
al. 2019, section 3).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megazoo.parallel.axes import Axis
from megazoo.parallel.collectives import (
    all_gather_last_dim,
    all_gather_parts,
    all_gather_sequence,
    all_reduce,
    exchange_parts,
    reduce_scatter_parts,
    reduce_scatter_sequence,
    summed,
)
from megazoo.parallel.compile import untraced
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.sequence import add_to_parts, in_order, in_parts


class _CopyToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _ReduceInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.mark_dirty(x)
        all_reduce(x, group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather_sequence(x, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_sequence(grad, ctx.group), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter_sequence(x, group)

    @staticmethod
    def backward(ctx, grad):
        return all_gather_sequence(grad, ctx.group), None


class _GatherFromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, sizes):
        ctx.group, ctx.sizes = group, sizes
        return all_gather_last_dim(x, group, sizes)

    @staticmethod
    def backward(ctx, grad):
        # the computation after a gather is replicated, so each rank keeps its part
        return grad.split(ctx.sizes, dim=-1)[ctx.group.rank()].contiguous(), None, None


class _ScatterToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, sizes):
        ctx.group, ctx.sizes = group, sizes
        return x.split(sizes, dim=-1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx, grad):
        return all_gather_last_dim(grad, ctx.group, ctx.sizes), None, None


class _GatherContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ends, group):
        ctx.group, ctx.dtype, ctx.shape = group, x.dtype, x.shape
        k, v = gathered_in_order(x, group)
        return tuple(tensor[..., :end, :] for end in ends for tensor in (k, v))

    @staticmethod
    def backward(ctx, *grads):
        own = torch.empty(ctx.shape, dtype=ctx.dtype, device=grads[0].device)
        # Keys, then values, in one buffer: it is as long as the sequence.
        parts = own.new_empty(ctx.group.size(), *own.shape[1:], dtype=torch.float32)
        for number, mine in enumerate(own):
            parts.zero_()
            for grad in grads[number::2]:
                add_to_parts(parts, grad)
            mine.copy_(reduce_scatter_parts(parts, ctx.group))
        return own, None, None


class _GatherFromContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered_in_order(x, group)

    @staticmethod
    def backward(ctx, grad):
        # the following computation is replicated, so each rank keeps its part
        return in_parts(grad, ctx.group.size())[ctx.group.rank()], None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, sends, receives):
        ctx.group, ctx.sends, ctx.receives = group, sends, receives
        return exchange_parts(x, group, sends, receives)

    @staticmethod
    def backward(ctx, grad):
        return exchange_parts(grad, ctx.group, ctx.receives, ctx.sends), None, None, None


@untraced
def _apply(function: type[torch.autograd.Function], *args):
    return function.apply(*args)


def enter_tensor_parallel(x: torch.Tensor, ctx: ParallelContext) -> torch.Tensor:
    """Enter a tensor-parallel region with x replicated on every rank. The gradient is all-reduced.

    Under sequence parallelism x is each rank's part of the sequence (dimension -2), and is
    all-gathered.
    """
    if ctx.sequence_parallel:
        return _apply(_GatherSequence, x, ctx.tp_group)
    return copy_to_tensor_parallel(x, ctx)


def gather_entering(x: torch.Tensor, ctx: ParallelContext) -> torch.Tensor:
    """Return a tensor without a gradient, such as indices, as `enter_tensor_parallel` returns x."""
    if not ctx.sequence_parallel:
        return x
    assert ctx.tp_group  # tp is above 1
    return all_gather_sequence(x, ctx.tp_group)


def leave_tensor_parallel(x: torch.Tensor, ctx: ParallelContext) -> torch.Tensor:
    """Leave a tensor-parallel region: all-reduce every rank's partial x. The gradient is passed
    unchanged.

    Under sequence parallelism x is reduce-scattered along the sequence (dimension -2).
    """
    if ctx.sequence_parallel:
        return _apply(_ReduceScatterSequence, x, ctx.tp_group)
    return reduce_from_tensor_parallel(x, ctx)


def leave_tensor_parallel_in_place(x: torch.Tensor, ctx: ParallelContext) -> torch.Tensor:
    """Leave a tensor-parallel region in place (see `leave_tensor_parallel`). No other code may use
    x, and the backward of the function that computed x must not need it."""
    if ctx.sequence_parallel or ctx.tp_size == 1:
        return leave_tensor_parallel(x, ctx)
    return _apply(_ReduceInPlace, x, ctx.tp_group)


def copy_to_tensor_parallel(x: torch.Tensor, ctx: ParallelContext) -> torch.Tensor:
    """Return x, which is replicated, for a different computation on each rank. The gradient is
    all-reduced."""
    return _apply(_CopyToTensorParallel, x, ctx.tp_group) if ctx.tp_size > 1 else x


def reduce_from_tensor_parallel(x: torch.Tensor, ctx: ParallelContext) -> torch.Tensor:
    """Return the sum of x over all ranks, for a replicated computation. The gradient is passed
    unchanged."""
    return _apply(_Reduce, x, ctx.tp_group) if ctx.tp_size > 1 else x


def gather_from_tensor_parallel(
    x: torch.Tensor, ctx: ParallelContext, sizes: list[int]
) -> torch.Tensor:
    """Concatenate the last dimension over the ranks. sizes: elements of each rank. The gradient of
    each rank is its part."""
    return _apply(_GatherFromTensorParallel, x, ctx.tp_group, sizes) if ctx.tp_size > 1 else x


def scatter_to_tensor_parallel(
    x: torch.Tensor, ctx: ParallelContext, sizes: list[int]
) -> torch.Tensor:
    """Return this rank's part of the last dimension. sizes: elements of each rank. The gradient is
    all-gathered."""
    return _apply(_ScatterToTensorParallel, x, ctx.tp_group, sizes) if ctx.tp_size > 1 else x


def gather_context(
    x: torch.Tensor, ends: Sequence[int], ctx: ParallelContext
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the keys and values of all context-parallel ranks, up to each of `ends`: [2, ...,
    part, size] -> a pair of [..., end, size] per end. All share one storage.

    ends: in tokens, multiples of a chunk. The computation differs between ranks, so the gradient is
    summed over all ends and ranks, in fp32.
    """
    gathered = _apply(_GatherContext, x, ends, ctx.cp_group)
    return list(zip(gathered[::2], gathered[1::2], strict=True))


def gathered_in_order(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather a sequence from all context-parallel ranks, without autograd: [..., part, size] ->
    [..., sequence, size]."""
    return in_order(all_gather_parts(x, group))


def gather_from_context(x: torch.Tensor, ctx: ParallelContext) -> torch.Tensor:
    """Gather a sequence for a replicated computation on all context-parallel ranks: [..., part,
    size] -> [..., sequence, size]. The gradient of each rank is its own part."""
    return _apply(_GatherFromContext, x, ctx.cp_group) if ctx.cp_size > 1 else x


def reduce_from_context(x: torch.Tensor, ctx: ParallelContext) -> torch.Tensor:
    """Return the sum of x over all context-parallel ranks, for a replicated computation. The
    gradient is passed unchanged."""
    return _apply(_Reduce, x, ctx.cp_group) if ctx.cp_size > 1 else x


def exchange(x: torch.Tensor, axis: Axis, sends: list[int], receives: list[int]) -> torch.Tensor:
    """Send sends[r] rows of x to each rank r of an axis, and return the received rows, receives[r]
    from each rank r (all-to-all): [sum of sends, ...] -> [sum of receives, ...]. The gradient is
    exchanged in reverse."""
    return _apply(_Exchange, x, axis.group, sends, receives)
