"""Activation recomputation: keep a function's inputs instead of what it saves for backward, and run it again there.

Dropout draws the same masks again, because it is seeded by names (see random.py). (torch.utils.checkpoint does as much,
but its first call imports torch._dynamo: 70 MB.)
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from megazoo.parallel.compile import untraced

MODES = ("none", "selective", "full")


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function, ctx.generator = function, torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx, grad):
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.generator)  # for a Dropout without a seed
        with torch.enable_grad():
            output = ctx.function(*inputs)
        torch.set_rng_state(now)
        torch.autograd.backward(output, grad)  # parameters inside the function get their gradients here
        return None, *(x.grad for x in inputs)


class _LinearOfRecomputed(torch.autograd.Function):
    """function(x) W^T + b that keeps x instead of function(x). The matrix product is not done again."""

    @staticmethod
    def forward(ctx, function, x, weight, bias):
        ctx.function, ctx.has_bias = function, bias is not None
        ctx.save_for_backward(x, weight)
        return F.linear(function(x), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        (x_grad,) = torch.autograd.grad(y, x, grad @ weight)
        grad = grad.flatten(0, -2)
        return None, x_grad, grad.t() @ y.detach().flatten(0, -2), grad.sum(0) if ctx.has_bias else None


@untraced
def recomputed(function: Callable, *inputs: torch.Tensor) -> torch.Tensor:
    """function(*inputs), keeping only the inputs for backward. At least one input must require a gradient."""
    return _Recompute.apply(function, *inputs)


@untraced
def linear_of_recomputed(
    function: Callable, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """F.linear(function(x), weight, bias), keeping x and not function(x) for backward."""
    return _LinearOfRecomputed.apply(function, x, weight, bias)
