"""The memory-saving twins of the layers' plain formulas, each tested equal to it."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from megazoo.parallel.compile import untraced
from megazoo.parallel.cpu.products import product_dtype
from megazoo.parallel.deferred import WeightQueue
from megazoo.parallel.recompute import replay
from megazoo.torch_internals import shares_storage


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    of: Callable[[torch.Tensor], torch.Tensor] | None = None,
    queue: WeightQueue | None = None,
) -> torch.Tensor:
    """of(x) W^T + b, keeping x and not of(x) for backward. queue: where the weight's gradient is to
    wait."""
    if of is None and queue is None and product_dtype(x) == x.dtype:
        return F.linear(x, weight, bias)
    return _linear(of, queue, x, weight, bias)


@untraced
def _linear(of, queue, x, weight, bias) -> torch.Tensor:
    return _Linear.apply(of, queue, x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, of, queue, x, weight, bias):
        # the Parameter itself: its gradient is added to later
        ctx.of, ctx.queue, ctx.weight = of, queue, weight
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


class _SplitHeads(torch.autograd.Function):
    """Gradients go into one tensor, where autograd would make three and join them; what is turned
    is kept once."""

    @staticmethod
    def forward(ctx, qkv, parts, head_size, cos, sin):
        ctx.parts, ctx.head_size = parts, head_size
        ctx.save_for_backward(cos, sin)
        if cos is None:
            return _heads(qkv, parts, head_size)
        turned = torch.empty_like(qkv)
        _SplitHeads._fill(ctx, turned, _heads(qkv, parts, head_size), cos, sin)
        return _heads(turned, parts, head_size)

    @staticmethod
    def backward(ctx, *grads):
        cos, sin = ctx.saved_tensors
        batch, _, sequence, _ = grads[0].shape
        grad = grads[0].new_empty(batch, sequence, sum(ctx.parts))
        _SplitHeads._fill(ctx, grad, grads, cos, None if sin is None else -sin)
        return grad, None, None, None, None

    @staticmethod
    def _fill(ctx, qkv, heads, cos, sin) -> None:
        """Write q, k and v into qkv, q and k turned."""
        if cos is not None and cos.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        for name, part, out in zip(
            "qkv", heads, _heads(qkv, ctx.parts, ctx.head_size), strict=True
        ):
            if cos is None or name == "v":
                out.copy_(part)
            else:
                turn(part, cos, sin, out)


def _heads(qkv: torch.Tensor, parts: Sequence[int], head_size: int) -> tuple[torch.Tensor, ...]:
    return tuple(
        part.unflatten(-1, (-1, head_size)).transpose(1, 2) for part in qkv.split(parts, dim=-1)
    )


class _Rotate(torch.autograd.Function):
    """What is turned by an angle forward is turned back by it backward."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin, torch.empty_like(x))

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, -sin, torch.empty_like(grad)), None, None


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write x, turned by cos and sin, to `out`. They expand to its shape, and each has two equal
    halves."""
    half = x.shape[-1] // 2
    first, second = x.split(half, dim=-1)
    torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(second, sin[..., :half], value=-1)
    out[..., half:].addcmul_(first, sin[..., :half])
    return out


class _Gated(torch.autograd.Function):
    """activation(gate) * up. Keeps what gate and up are views of, and nothing else, and fills its
    gradient at once."""

    @staticmethod
    def forward(ctx, activation, inner):
        ctx.activation = activation
        ctx.save_for_backward(inner)
        gate, up = inner.chunk(2, dim=-1)
        activated = activation(gate)
        if shares_storage(activated, inner):  # the identity's
            return activated * up
        return activated.mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (inner,) = ctx.saved_tensors
        gate, up = inner.chunk(2, dim=-1)
        gate, inner_grad = gate.detach().requires_grad_(), torch.empty_like(inner)
        gate_grad, up_grad = inner_grad.chunk(2, dim=-1)
        with torch.enable_grad():
            activated = ctx.activation(gate)
        torch.mul(grad, activated.detach(), out=up_grad)
        gate_grad.copy_(*torch.autograd.grad(activated, gate, torch.mul(grad, up, out=gate_grad)))
        return None, inner_grad


class _RMSNorm(torch.autograd.Function):
    """Keeps x, and not what it is normalised to, for backward."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        y = (wide * scale).to(x.dtype)
        return y.mul_(weight) if weight.dtype == y.dtype else weight * y

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normalised = x.float() * scale
        weight_grad = (grad * normalised.to(x.dtype)).flatten(0, -2).sum(0)
        grad = (grad * weight).float()
        x_grad = (grad - normalised * (grad * normalised).mean(-1, keepdim=True)).mul_(scale)
        return x_grad.to(x.dtype), weight_grad, None
