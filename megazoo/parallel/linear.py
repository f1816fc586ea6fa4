"""The matrix product of linear layers, with two liberties: what it keeps for backward, and when its weight's gradient
is computed."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megazoo.parallel.compile import untraced
from megazoo.parallel.recompute import replay

WIDENED_ROWS = 128  # see product_dtype


class WeightQueue:
    """Weight gradients that wait for an idle moment of the pipeline (Qi et al. 2023).

    received: called once for each weight that a micro-batch has added to. weights: all that have ever waited.
    """

    def __init__(self, received: Callable[[torch.nn.Parameter], None]):
        self.received = received
        self.weights: set[torch.nn.Parameter] = set()
        self._waiting: list[tuple[torch.nn.Parameter, Callable[[], torch.Tensor]]] = []

    def put(self, weight: torch.nn.Parameter, gradient: Callable[[], torch.Tensor]) -> None:
        """Add gradient() to the weight's later."""
        self._waiting.append((weight, gradient))
        self.weights.add(weight)

    def take(self) -> Callable[[], None]:
        """A function that computes what has been put so far, in the order in which autograd would have."""
        waiting, self._waiting = self._waiting, []

        def compute() -> None:
            weights = dict.fromkeys(weight for weight, _ in waiting)
            while waiting:
                weight, gradient = waiting.pop(0)
                if weight.grad is None:
                    weight.grad = gradient().float()
                else:
                    weight.grad += gradient()
            for weight in weights:
                self.received(weight)

        return compute


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    of: Callable[[torch.Tensor], torch.Tensor] | None = None,
    queue: WeightQueue | None = None,
) -> torch.Tensor:
    """of(x) W^T + b, keeping x and not of(x) for backward. queue: where the weight's gradient is to wait."""
    if of is None and queue is None and product_dtype(x) == x.dtype:
        return F.linear(x, weight, bias)
    return _linear(of, queue, x, weight, bias)


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """What x, [..., features], is multiplied as: its own dtype, but for bfloat16 on a CPU without AMX.

    There fp32 is 1.6 x as fast (245 against 145 GFLOP/s on two cores with AVX-512's bfloat16), and sums as exactly. Of
    few rows, as in generation, the weights would take longer to widen than to multiply.
    """
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return x.dtype
    return torch.float32 if x.shape[:-1].numel() >= WIDENED_ROWS and not _has_bfloat16_units() else x.dtype


@functools.cache
def _has_bfloat16_units() -> bool:
    """AMX, on x86; of other CPUs torch does not tell, and they multiply it as it is."""
    return not torch.backends.cpu.get_cpu_capability().startswith("AVX") or torch.cpu._is_amx_tile_supported()


@untraced
def _linear(of, queue, x, weight, bias) -> torch.Tensor:
    return _Linear.apply(of, queue, x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, of, queue, x, weight, bias):
        ctx.of, ctx.queue, ctx.weight = of, queue, weight  # the Parameter itself: its gradient is added to later
        ctx.generator = torch.get_rng_state() if of else None
        ctx.save_for_backward(x)
        dtype = product_dtype(x)
        bias = None if bias is None else bias.to(dtype)
        return F.linear((of(x) if of else x).to(dtype), weight.to(dtype), bias).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,), weight = ctx.saved_tensors, ctx.weight
        y, x_grad = x, None
        if ctx.of:
            x = x.detach().requires_grad_()
            y = replay(ctx.of, ctx.generator, x)
        dtype = product_dtype(x)
        grad = grad.to(dtype)
        if ctx.needs_input_grad[2]:
            x_grad = (grad @ weight.to(dtype)).to(x.dtype)
            if ctx.of:
                (x_grad,) = torch.autograd.grad(y, x, x_grad)
        rows, inputs = grad.flatten(0, -2), y.detach().flatten(0, -2).to(dtype)
        weight_grad = bias_grad = None
        if ctx.needs_input_grad[3]:
            if ctx.queue:
                ctx.queue.put(weight, lambda: rows.t() @ inputs)
            else:
                weight_grad = rows.t() @ inputs
        if ctx.needs_input_grad[4]:
            bias_grad = rows.sum(0)
        return None, None, x_grad, weight_grad, bias_grad
