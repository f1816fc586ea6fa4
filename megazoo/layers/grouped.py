"""Products of groups of rows, each group with another matrix: the linear layers of experts."""

from functools import partial

import torch
import torch.nn.functional as F

from megazoo.parallel.compile import untraced
from megazoo.parallel.cpu.products import product_dtype
from megazoo.parallel.deferred import AtOnce, WeightQueue

KERNEL_BYTES = 16  # the kernel for groups needs rows whose bytes are a multiple of this


@untraced  # the compiler accepts the kernel only in bfloat16
def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor,
    queue: WeightQueue | AtOnce | None = None,
) -> torch.Tensor:
    """Multiply each group of rows with another matrix.

    The kernel for groups is used if it accepts the sizes. The formula is
    `grouped_linear_formula`.

    Args:
        x: the rows, group by group, [rows, inputs].
        weight: [groups, outputs, inputs].
        counts: rows of each group, int64 [groups].
        queue: a WeightQueue adds the gradient of the weight later, instead of autograd.

    Returns:
        [rows, outputs].
    """
    if isinstance(queue, WeightQueue) and weight.requires_grad:
        return _Grouped.apply(queue, counts, x, weight)
    return _products(x, weight, counts)


def grouped_linear_formula(
    x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Multiply each group of rows with another matrix: see `grouped_linear`."""
    groups = zip(x.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in groups])


def _products(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if x.is_meta:  # the counts have no values; one matrix costs as much as several
        return F.linear(x, weight[0])
    if not _kernel_accepts(x, *weight.shape[1:]):
        return grouped_linear_formula(x, weight, counts)
    dtype = product_dtype(x)  # CPUs may multiply bfloat16 faster as fp32
    ends = counts.cumsum(0).int()
    return F.grouped_mm(x.to(dtype), weight.to(dtype).mT, offs=ends).to(x.dtype)


def _kernel_accepts(x: torch.Tensor, *sizes: int) -> bool:
    aligned = all(size * x.element_size() % KERNEL_BYTES == 0 for size in sizes)
    return aligned and len(x) > 0


class _Grouped(torch.autograd.Function):
    """`grouped_linear`, of which a queue adds the gradient of the weight."""

    @staticmethod
    def forward(ctx, queue, counts, x, weight):
        # the Parameter itself, not a saved tensor: the queue adds to its gradient later
        ctx.queue, ctx.weight = queue, weight
        ctx.save_for_backward(x, counts)
        return _products(x, weight, counts)

    @staticmethod
    def backward(ctx, grad):
        x, counts = ctx.saved_tensors
        x_grad = _products(grad, ctx.weight.mT, counts) if ctx.needs_input_grad[2] else None
        add = partial(_add_gradients, grad=grad, x=x.detach(), counts=counts)
        ctx.queue.put_sum(ctx.weight, add)
        return None, None, x_grad, None


@torch.no_grad()
def _add_gradients(
    total: torch.Tensor | None, grad: torch.Tensor, x: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Return total plus the gradients of the matrices of all groups, in fp32, in total's memory.

    total: [groups, outputs, inputs], or None. grad: [rows, outputs]. x: [rows, inputs].
    """
    if x.is_meta:
        sums = (grad.t() @ x).expand(len(counts), -1, -1).contiguous()
    elif _kernel_accepts(x, grad.shape[1], x.shape[1]):
        dtype, ends = product_dtype(x), counts.cumsum(0).int()
        sums = F.grouped_mm(grad.to(dtype).t(), x.to(dtype), offs=ends)
    else:
        groups = zip(grad.split(counts.tolist()), x.split(counts.tolist()), strict=True)
        sums = torch.stack([rows.t() @ inputs for rows, inputs in groups])
    return sums.float() if total is None else total.add_(sums)
