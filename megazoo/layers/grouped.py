"""Products of groups of rows, each group with another matrix: the linear layers of experts."""

from functools import partial

import torch

from megazoo.layers.product import PLAIN, Product
from megazoo.parallel.compile import untraced
from megazoo.parallel.cpu.products import multiplies_by_onednn
from megazoo.parallel.deferred import AtOnce, WeightQueue


@untraced  # the compiler accepts the kernel only in bfloat16
def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor,
    *,
    product: Product = PLAIN,
    queue: WeightQueue | AtOnce | None = None,
) -> torch.Tensor:
    """Multiply each group of rows with another matrix.

    The kernel for groups is used if it accepts the sizes. The formula is `grouped_linear_formula`.

    Args:
        x: the rows, group by group, [rows, inputs].
        weight: [groups, outputs, inputs].
        counts: rows of each group, int64 [groups].
        product: multiplies.
        queue: a WeightQueue adds the gradient of the weight later, instead of autograd. AtOnce has
            no effect.

    Returns:
        [rows, outputs].
    """
    later = isinstance(queue, WeightQueue) and weight.requires_grad and queue.serves(x, weight)
    if later or product is not PLAIN or multiplies_by_onednn(x, weight.shape[1:].numel()):
        return _Grouped.apply(product, queue if later else None, counts, x, weight)
    return product.output(x, weight, counts=counts)


class _Grouped(torch.autograd.Function):
    """`grouped_linear` by a product, or with a queue that adds the gradient of the weight."""

    @staticmethod
    def forward(ctx, product, queue, counts, x, weight):
        # the Parameter itself, not a saved tensor: the queue adds to its gradient later
        ctx.product, ctx.queue, ctx.weight = product, queue, weight
        ctx.save_for_backward(x if ctx.needs_input_grad[4] else None, counts)
        return product.output(x, weight, counts=counts)

    @staticmethod
    def backward(ctx, grad):
        x, counts = ctx.saved_tensors
        grad, x_grad, weight_grad = ctx.product.gradient(grad), None, None
        if ctx.needs_input_grad[3]:
            x_grad = ctx.product.input_gradient(grad, ctx.weight, counts)
        if ctx.queue:
            # detached: a queue multiplies while autograd records
            sums = {"grad": grad, "x": x.detach(), "counts": counts}
            ctx.queue.put(ctx.weight, partial(ctx.product.add_weight_gradient, **sums))
        elif ctx.needs_input_grad[4]:
            weight_grad = ctx.product.weight_gradient(grad, x, counts)
        return None, None, None, x_grad, weight_grad
