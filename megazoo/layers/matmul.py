"""The matrix products of linear layers, of one x with one weight or with several.

All of them call `multiply`. It is F.linear unless it can save memory or overlap
communication. Otherwise it is a fused version, which computes the formula in its docstring.
tests/unit/layers/test_fused.py compares values and gradients of the two.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from megazoo.layers.aligned import aligned, aligned_product, needs_alignment
from megazoo.parallel.collectives import (
    all_gather_sequence,
    begin_all_gather_sequence,
    begin_reduce_scatter_sequence,
    begin_sum,
)
from megazoo.parallel.compile import untraced
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.cpu.products import linear_for, product_dtype
from megazoo.parallel.deferred import AtOnce, WeightQueue
from megazoo.parallel.recompute import Moment, replay
from megazoo.parallel.regions import enter_tensor_parallel

Weights = Sequence[torch.Tensor]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    entering: ParallelContext | None = None,
    recompute: Callable[[torch.Tensor], torch.Tensor] | None = None,
    queue: WeightQueue | AtOnce | None = None,
    align: bool = False,
) -> torch.Tensor:
    """Return x W^T + b, [..., inputs] -> [..., outputs]: see `multiply`."""
    how = {"entering": entering, "recompute": recompute, "queue": queue, "align": align}
    return multiply(x, (weight,), bias, **how)[0]


def multiply(
    x: torch.Tensor,
    weights: Weights,
    bias: torch.Tensor | None = None,
    *,
    entering: ParallelContext | None = None,
    recompute: Callable[[torch.Tensor], torch.Tensor] | None = None,
    queue: WeightQueue | AtOnce | None = None,
    align: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return x W^T for each weight; the bias is added to the first.

    Same as: F.linear(x, weight, bias) and so on, of enter_tensor_parallel(x, entering), or of
    recompute(x), except that CPUs multiply bfloat16 as fp32 if that is faster. Only x is saved for
    backward; if all weights are frozen and nothing is recomputed, it is not saved either.

    Args:
        x: [..., inputs], or the input of recompute. When entering under sequence parallelism, it is
            this rank's part of the sequence. The part is saved, and gathered again in backward.
        weights: [outputs, inputs] each.
        bias: [outputs] of the first weight.
        entering: the context whose tensor-parallel region x enters here, once for all weights. The
            gradient of x is summed over tp. Not together with recompute.
        recompute: a function without parameters that is applied to x, and run again in backward.
        queue: adds the gradients of the weights instead of autograd: immediately, or in idle time
            of the pipeline.
        align: whether to align the rows of the results, for numbers of outputs such as the size of
            a vocabulary: see aligned.py. Not together with a bias.
    """
    align = align and any(needs_alignment(x, len(weight)) for weight in weights)
    if entering is not None and entering.tp_size > 1:
        if hides_communication(x):
            queues = _queues(queue, x, weights)
            return _entered_linears(entering, queues, align, x, bias, *weights)
        enter = partial(enter_tensor_parallel, ctx=entering)
        if entering.sequence_parallel and any(weight.requires_grad for weight in weights):
            recompute = enter
        else:
            x = enter(x)
    queues = _queues(queue, x, weights)
    if recompute is None and not any(queues) and not align and product_dtype(x) == x.dtype:
        first, *others = weights
        more = (linear_for(x, weight)(x, weight, None) for weight in others)
        return linear_for(x, first)(x, first, bias), *more
    return _linears(recompute, queues, align, x, bias, *weights)


def _products(x: torch.Tensor, weights: Weights, bias: torch.Tensor | None) -> tuple:
    first, *others = weights
    more = (linear_for(x, weight)(x, weight, None) for weight in others)
    return linear_for(x, first)(x, first, bias), *more


def _queues(queue: WeightQueue | AtOnce | None, x: torch.Tensor, weights: Weights) -> tuple:
    """Return one entry per weight: the queue if it serves the weight, otherwise None."""
    if queue is None:
        return (None,) * len(weights)
    return tuple(
        queue if weight.requires_grad and queue.serves(x, weight) else None for weight in weights
    )


@untraced
def _linears(recompute, queues, align, x, bias, *weights) -> tuple[torch.Tensor, ...]:
    return _Linears.apply(recompute, queues, align, x, bias, *weights)


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, recompute, queues, align, x, bias, *weights):
        # the Parameters themselves, not saved tensors: the queue adds to their gradients later
        ctx.recompute, ctx.queues, ctx.align, ctx.weights = recompute, queues, align, weights
        ctx.first = Moment.now() if recompute else None
        keeps_x = recompute is not None or any(ctx.needs_input_grad[-len(weights) :])
        ctx.save_for_backward(x if keeps_x else None)
        dtype = product_dtype(x)
        inputs = recompute(x) if recompute else x
        if align:
            return tuple(aligned_product(inputs, weight) for weight in weights)
        weights = [weight.to(dtype) for weight in weights]
        bias = None if bias is None else bias.to(dtype)
        return tuple(y.to(x.dtype) for y in _products(inputs.to(dtype), weights, bias))

    @staticmethod
    def backward(ctx, *grads):
        (x,), x_grad = ctx.saved_tensors, None
        own, dtype = grads[0].dtype, product_dtype(grads[0])
        if ctx.recompute:
            x = x.detach().requires_grad_()
            inputs = replay(ctx.recompute, ctx.first, x)
        else:
            inputs = x
        grads = [_aligned_rows(grad) if ctx.align else grad.to(dtype) for grad in grads]
        if ctx.needs_input_grad[3]:
            x_grad = _gradient_of_input(grads, [w.to(dtype) for w in ctx.weights]).to(own)
            if ctx.recompute:
                (x_grad,) = torch.autograd.grad(inputs, x, x_grad)
        inputs = None if inputs is None else inputs.to(dtype)
        return None, None, None, x_grad, *_gradients_of_weights(ctx, grads, inputs)


def _gradient_of_input(grads: Weights, weights: Weights) -> torch.Tensor:
    """Return the gradient of the input: the sum over the weights of gradient x weight."""
    (first, *others), (weight, *rest) = grads, weights
    rows = first.flatten(0, -2) @ weight
    for grad, weight in zip(others, rest, strict=True):
        rows.addmm_(grad.flatten(0, -2), weight)
    return rows.unflatten(0, first.shape[:-1])


def _gradients_of_weights(ctx, grads: Weights, inputs: torch.Tensor | None) -> tuple:
    """Return the gradients of a bias and of the weights; for a weight with a queue, the result of
    the queue.

    ctx: of an autograd function whose last arguments they are. grads: gradients of its results,
    [..., outputs]. inputs: the input of the products, [..., inputs].
    """
    grad_rows = [grad.flatten(0, -2) for grad in grads]
    # a queue multiplies while autograd records
    input_rows = None if inputs is None else inputs.detach().flatten(0, -2)
    bias_wanted, *wanted = ctx.needs_input_grad[-len(grads) - 1 :]
    gradients = [grad_rows[0].sum(0) if bias_wanted else None]
    for weight, queue, grad, is_wanted in zip(
        ctx.weights, ctx.queues, grad_rows, wanted, strict=True
    ):
        if not is_wanted:
            gradients.append(None)
            continue
        assert input_rows is not None  # they are saved if a weight is trained
        if queue:
            gradients.append(queue.put(weight, grad.t(), input_rows))
        else:
            gradients.append(torch.mm(grad.t(), input_rows))
    return tuple(gradients)


def hides_communication(x: torch.Tensor) -> bool:
    """Return whether _EnteredLinears is faster for x: in training on CUDA, where collectives
    overlap with products. On CPUs both would use the same cores. Plans for GPUs run on the meta
    device."""
    return (x.is_cuda or x.is_meta) and torch.is_grad_enabled()


@untraced
def _entered_linears(parallel, queues, align, x, bias, *weights) -> tuple[torch.Tensor, ...]:
    return _EnteredLinears.apply(parallel, queues, align, x, bias, *weights)


class _EnteredLinears(torch.autograd.Function):
    """Enter the tensor-parallel region and multiply, with overlapped communication in backward.

    The gradients of the weights are computed while the gradient of x is summed over the ranks (or
    reduce-scattered, under sequence parallelism). This rank's part of x is gathered again while the
    gradient of x is computed, if any weight is trained. The sum is computed in place.
    """

    @staticmethod
    def forward(ctx, parallel, queues, align, x, bias, *weights):
        ctx.parallel, ctx.queues, ctx.align, ctx.weights = parallel, queues, align, weights
        ctx.save_for_backward(x if any(ctx.needs_input_grad[-len(weights) :]) else None)
        if parallel.sequence_parallel:
            x = all_gather_sequence(x, parallel.tp_group)
        if align:
            return tuple(aligned_product(x, weight) for weight in weights)
        return _products(x, weights, bias)

    @staticmethod
    def backward(ctx, *grads):
        (x,), summed = ctx.saved_tensors, None
        cut, group = ctx.parallel.sequence_parallel, ctx.parallel.tp_group
        grads = [_aligned_rows(grad) if ctx.align else grad for grad in grads]
        gathered = begin_all_gather_sequence(x, group) if cut and x is not None else None
        if ctx.needs_input_grad[3]:
            x_grad = _gradient_of_input(grads, ctx.weights)
            summed = (begin_reduce_scatter_sequence if cut else begin_sum)(x_grad, group)
        gradients = _gradients_of_weights(ctx, grads, gathered() if gathered else x)
        return None, None, None, summed() if summed else None, *gradients


def _aligned_rows(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient, [..., outputs], with aligned rows."""
    return aligned(grad.flatten(0, -2)).unflatten(0, grad.shape[:-1])
