"""The matrix products of linear layers, of one x with one weight or with several.

All of them call `multiply`. It calls `Product.output` if that needs no more memory. Otherwise it
runs an autograd function that calls the product, saves less and may overlap communication.
tests/unit/layers/test_fused.py compares values and gradients of the two.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from megazoo.layers.aligned import needs_alignment
from megazoo.layers.product import ALIGNED, PLAIN, Product
from megazoo.parallel.collectives import (
    all_gather_sequence,
    begin_all_gather_sequence,
    begin_reduce_scatter_sequence,
    begin_sum,
)
from megazoo.parallel.compile import untraced
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.cpu.products import multiplies_by_onednn, product_dtype
from megazoo.parallel.deferred import AtOnce, WeightQueue
from megazoo.parallel.recompute import Moment, replay
from megazoo.parallel.regions import enter_tensor_parallel

Weights = Sequence[torch.Tensor]
Inputs = torch.Tensor | tuple[torch.Tensor, ...]  # several only with recompute
Recompute = Callable[..., torch.Tensor]


def linear(
    x: Inputs,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    product: Product = PLAIN,
    entering: ParallelContext | None = None,
    recompute: Recompute | None = None,
    queue: WeightQueue | AtOnce | None = None,
) -> torch.Tensor:
    """Return x W^T + b, [..., inputs] -> [..., outputs]: see `multiply`."""
    how = {"entering": entering, "recompute": recompute, "queue": queue}
    return multiply(x, (weight,), bias, products=(product,), **how)[0]


def product_of_head(x: torch.Tensor, weight: torch.Tensor) -> Product:
    """Return the Product of an output head: ALIGNED if rows of its number of outputs are slow."""
    return ALIGNED if needs_alignment(x, len(weight)) else PLAIN


def multiply(
    x: Inputs,
    weights: Weights,
    bias: torch.Tensor | None = None,
    *,
    products: Sequence[Product] | None = None,
    entering: ParallelContext | None = None,
    recompute: Recompute | None = None,
    queue: WeightQueue | AtOnce | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return x W^T for each weight; the bias is added to the first.

    Same as: F.linear(x, weight, bias) and so on, of enter_tensor_parallel(x, entering), or of
    recompute(*x), except that CPUs multiply bfloat16 as fp32 if that is faster. Only x is saved for
    backward; if all weights are frozen and nothing is recomputed, it is not saved either.

    Args:
        x: [..., inputs]; or the input of recompute, or a tuple of its inputs. When entering under
            sequence parallelism, it is this rank's part of the sequence. The part is saved, and
            gathered again in backward.
        weights: [outputs, inputs] each.
        bias: [outputs] of the first weight.
        products: the Product of each weight; by default PLAIN.
        entering: the context whose tensor-parallel region x enters here, once for all weights. The
            gradient of x is summed over tp. Not together with recompute.
        recompute: a function without parameters that is applied to x, and run again in backward.
            It returns [..., inputs].
        queue: adds the gradients of the weights instead of autograd: immediately, or in idle time
            of the pipeline.
    """
    products = (PLAIN,) * len(weights) if products is None else tuple(products)
    inputs = x if isinstance(x, tuple) else (x,)
    x = inputs[0]
    if entering is not None and entering.tp_size > 1:
        if hides_communication(x):
            queues = _queues(queue, x, weights)
            return _entered_linears(entering, queues, products, x, bias, *weights)
        enter = partial(enter_tensor_parallel, ctx=entering)
        if entering.sequence_parallel and any(weight.requires_grad for weight in weights):
            recompute = enter
        else:
            inputs = (x := enter(x),)
    queues = _queues(queue, x, weights) if torch.is_grad_enabled() else ()
    if recompute is None and not any(queues):
        dtype = _dtype_of(products, x)
        if not torch.is_grad_enabled():
            return _outputs(products, x, weights, bias, dtype)
        is_plain = dtype == x.dtype and set(products) == {PLAIN}
        if is_plain and not any(multiplies_by_onednn(x, weight.numel()) for weight in weights):
            return _outputs(products, x, weights, bias, dtype)  # autograd saves only x, too
    return _linears(recompute, queues, products, inputs, bias, *weights)


def _dtype_of(products: Sequence[Product], x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which to multiply x."""
    return product_dtype(x) if all(product.widens for product in products) else x.dtype


def _outputs(
    products: Sequence[Product],
    x: torch.Tensor,
    weights: Weights,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """Return the output of each product, in the dtype of x. dtype: of the factors."""
    own = x.dtype
    if dtype != own:
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        weights = [weight.to(dtype) for weight in weights]
    results = [products[0].output(x, weights[0], bias)]
    for product, weight in zip(products[1:], weights[1:], strict=True):
        results.append(product.output(x, weight))
    return tuple(results if dtype == own else [y.to(own) for y in results])


def _queues(queue: WeightQueue | AtOnce | None, x: torch.Tensor, weights: Weights) -> tuple:
    """Return one entry per weight: the queue if it serves the weight, otherwise None."""
    if queue is None:
        return (None,) * len(weights)
    return tuple(
        queue if weight.requires_grad and queue.serves(x, weight) else None for weight in weights
    )


@untraced
def _linears(recompute, queues, products, inputs, bias, *weights) -> tuple[torch.Tensor, ...]:
    return _Linears.apply(recompute, queues, products, len(inputs), *inputs, bias, *weights)


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, recompute, queues, products, count, *tensors):
        inputs, bias, weights = tensors[:count], tensors[count], tensors[count + 1 :]
        # the Parameters themselves, not saved tensors: the queue adds to their gradients later
        ctx.recompute, ctx.queues, ctx.products, ctx.weights = recompute, queues, products, weights
        ctx.first = Moment.now() if recompute else None
        keeps_x = recompute is not None or any(ctx.needs_input_grad[-len(weights) :])
        ctx.save_for_backward(*(inputs if keeps_x else [None]))
        dtype, x = _dtype_of(products, inputs[0]), inputs[0]
        return _outputs(products, recompute(*inputs) if recompute else x, weights, bias, dtype)

    @staticmethod
    def backward(ctx, *grads):
        inputs, x = ctx.saved_tensors, ctx.saved_tensors[0]
        own, dtype = grads[0].dtype, _dtype_of(ctx.products, grads[0])
        wanted = ctx.needs_input_grad[4 : 4 + len(inputs)]
        if ctx.recompute:
            pairs = zip(inputs, wanted, strict=True)
            inputs = [each.detach().requires_grad_(is_wanted) for each, is_wanted in pairs]
            x = replay(ctx.recompute, ctx.first, *inputs)
        input_grads: list = [None] * len(inputs)
        rows = [_rows(grad).to(dtype) for grad in grads]
        bias_grad, rows = _bias_gradient(ctx, rows), _of_products(ctx.products, rows)
        if any(wanted):
            weights = ctx.weights
            if dtype != own:
                weights = [weight.to(dtype) for weight in weights]
            x_grad = _gradient_of_input(ctx.products, rows, weights).to(own)
            x_grad = x_grad.view(*grads[0].shape[:-1], x_grad.shape[-1])
            if ctx.recompute:
                trained = [each for each in inputs if each.requires_grad]
                found = iter(torch.autograd.grad(x, trained, x_grad))
                input_grads = [next(found) if each.requires_grad else None for each in inputs]
            else:
                input_grads = [x_grad]
        x = None if x is None else x.to(dtype)
        weight_grads = _gradients_of_weights(ctx, rows, x)
        return None, None, None, None, *input_grads, bias_grad, *weight_grads


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return [..., features] as [rows, features]."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def _bias_gradient(ctx, rows: Weights) -> torch.Tensor | None:
    """Return the gradient of the bias, or None if it is not trained. ctx: as in
    `_gradients_of_weights`."""
    return rows[0].sum(0) if ctx.needs_input_grad[-len(rows) - 1] else None


def _of_products(products: Sequence[Product], rows: Weights) -> list[torch.Tensor]:
    """Return the gradients of the outputs, [rows, outputs], as the products use them."""
    return [product.gradient(grad) for product, grad in zip(products, rows, strict=True)]


def _gradient_of_input(
    products: Sequence[Product], rows: Weights, weights: Weights
) -> torch.Tensor:
    """Return the gradient of the input, [rows, inputs]: the sum over the weights of gradient x
    weight."""
    total = None
    for product, grad, weight in zip(products, rows, weights, strict=True):
        total = product.input_gradient(grad, weight, total=total)
    assert total is not None  # there is a weight
    return total


def _gradients_of_weights(ctx, rows: Weights, inputs: torch.Tensor | None) -> tuple:
    """Return the gradients of the weights; for a weight with a queue, the result of the queue.

    ctx: of an autograd function whose last arguments they are. rows: gradients of its results,
    [rows, outputs]. inputs: the input of the products, [..., inputs].
    """
    input_rows = None if inputs is None else _rows(inputs)
    wanted, gradients = ctx.needs_input_grad[-len(rows) :], []
    for product, weight, queue, grad, is_wanted in zip(
        ctx.products, ctx.weights, ctx.queues, rows, wanted, strict=True
    ):
        if not is_wanted:
            gradients.append(None)
            continue
        assert input_rows is not None  # they are saved if a weight is trained
        if queue:
            # detached: a queue multiplies while autograd records
            add = partial(product.add_weight_gradient, grad=grad, x=input_rows.detach())
            gradients.append(queue.put(weight, add))
        else:
            gradients.append(product.weight_gradient(grad, input_rows))
    return tuple(gradients)


def hides_communication(x: torch.Tensor) -> bool:
    """Return whether _EnteredLinears is faster for x: in training on CUDA, where collectives
    overlap with products. On CPUs both would use the same cores. Plans for GPUs run on the meta
    device."""
    return (x.is_cuda or x.is_meta) and torch.is_grad_enabled()


@untraced
def _entered_linears(parallel, queues, products, x, bias, *weights) -> tuple[torch.Tensor, ...]:
    return _EnteredLinears.apply(parallel, queues, products, x, bias, *weights)


class _EnteredLinears(torch.autograd.Function):
    """Enter the tensor-parallel region and multiply, with overlapped communication in backward.

    The gradients of the weights are computed while the gradient of x is summed over the ranks (or
    reduce-scattered, under sequence parallelism). This rank's part of x is gathered again while the
    gradient of x is computed, if any weight is trained. The sum is computed in place.
    """

    @staticmethod
    def forward(ctx, parallel, queues, products, x, bias, *weights):
        ctx.parallel, ctx.queues, ctx.products, ctx.weights = parallel, queues, products, weights
        ctx.save_for_backward(x if any(ctx.needs_input_grad[-len(weights) :]) else None)
        if parallel.sequence_parallel:
            x = all_gather_sequence(x, parallel.tp_group)
        return _outputs(products, x, weights, bias, x.dtype)

    @staticmethod
    def backward(ctx, *grads):
        (x,), summed = ctx.saved_tensors, None
        cut, group = ctx.parallel.sequence_parallel, ctx.parallel.tp_group
        rows = [grad.flatten(0, -2) for grad in grads]
        bias_grad, rows = _bias_gradient(ctx, rows), _of_products(ctx.products, rows)
        gathered = begin_all_gather_sequence(x, group) if cut and x is not None else None
        if ctx.needs_input_grad[3]:
            x_grad = _gradient_of_input(ctx.products, rows, ctx.weights)
            x_grad = x_grad.unflatten(0, grads[0].shape[:-1])
            summed = (begin_reduce_scatter_sequence if cut else begin_sum)(x_grad, group)
        gradients = _gradients_of_weights(ctx, rows, gathered() if gathered else x)
        return None, None, None, summed() if summed else None, bias_grad, *gradients
