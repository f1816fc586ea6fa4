"""The memory-saving twins of the layers' plain formulas.

A twin computes what its formula computes ("Same as") and keeps less of it for backward, or writes
it where it will be needed. tests/test_fused.py compares the two, values and gradients. The twins of
the cross-entropies stand in fused_cross_entropy.py.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from megazoo.layers.aligned import aligned, aligned_product, needs_alignment
from megazoo.parallel.collectives import (
    all_gather_sequence,
    begin_all_gather_sequence,
    begin_reduce_scatter_sequence,
    begin_sum,
)
from megazoo.parallel.compile import untraced
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.cpu.products import product_dtype
from megazoo.parallel.deferred import AtOnce, WeightQueue
from megazoo.parallel.recompute import replay
from megazoo.torch_internals import shares_storage, silu_backward

CosAndSin = tuple[torch.Tensor, torch.Tensor]


def replaced_by(twin: Callable) -> Callable[[Callable], Callable]:
    """Decorate a plain formula, which is there to be read and for torch.compile: calls run `twin`
    in its place, which computes the same and keeps less for backward.

    Under torch.compile the formula itself runs, and the compiler decides what is kept.
    """

    def decorate(formula: Callable) -> Callable:
        @functools.wraps(formula)
        def run(*args, **kwargs):
            if torch.compiler.is_compiling():
                return formula(*args, **kwargs)
            return twin(*args, **kwargs)

        return run

    return decorate


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recompute: Callable[[torch.Tensor], torch.Tensor] | None = None,
    queue: WeightQueue | AtOnce | None = None,
    align: bool = False,
) -> torch.Tensor:
    """Return x W^T + b, or recompute(x) W^T + b, keeping x alone for backward.

    Same as: F.linear(recompute(x), weight, bias), but that bfloat16 is multiplied as fp32 on CPUs
    where that is faster.

    Args:
        x: [..., inputs], or what recompute turns into that.
        weight: [outputs, inputs]; bias: [outputs].
        recompute: a function without parameters of its own, run again in backward.
        queue: what adds up the weight's gradient if autograd does not: at once, or in an idle
            moment of the pipeline.
        align: the number of outputs may be odd, as a vocabulary's: see aligned.py. No bias then.
    """
    align = align and needs_alignment(x, len(weight))
    queue = queue if queue and queue.serves(x, weight) else None
    if recompute is None and queue is None and not align and product_dtype(x) == x.dtype:
        return F.linear(x, weight, bias)
    return _linear(recompute, queue, align, x, weight, bias)


@untraced
def _linear(recompute, queue, align, x, weight, bias) -> torch.Tensor:
    return _Linear.apply(recompute, queue, align, x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, recompute, queue, align, x, weight, bias):
        # the Parameter itself, not a saved tensor: the queue adds to its gradient later
        ctx.recompute, ctx.queue, ctx.align, ctx.weight = recompute, queue, align, weight
        ctx.generator = torch.get_rng_state() if recompute else None
        ctx.save_for_backward(x)
        dtype = product_dtype(x)
        inputs = recompute(x) if recompute else x
        if align:
            return aligned_product(inputs, weight)
        bias = None if bias is None else bias.to(dtype)
        return F.linear(inputs.to(dtype), weight.to(dtype), bias).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,), weight = ctx.saved_tensors, ctx.weight
        inputs, x_grad = x, None
        if ctx.recompute:
            x = x.detach().requires_grad_()
            inputs = replay(ctx.recompute, ctx.generator, x)
        dtype = product_dtype(x)
        grad = _aligned_rows(grad) if ctx.align else grad.to(dtype)
        if ctx.needs_input_grad[3]:
            x_grad = (grad @ weight.to(dtype)).to(x.dtype)
            if ctx.recompute:
                (x_grad,) = torch.autograd.grad(inputs, x, x_grad)
        return None, None, None, x_grad, *_gradients_of_weights(ctx, grad, inputs.to(dtype))


def _gradients_of_weights(ctx, grad: torch.Tensor, inputs: torch.Tensor) -> tuple:
    """Return the gradients of a linear layer's weight, or what its queue leaves of it, and bias.

    ctx: of an autograd function whose last two arguments they are. grad, inputs: of what it
    returned, and what was multiplied: [..., outputs] and [..., inputs].
    """
    # a queue multiplies where autograd records
    grad_rows, input_rows = grad.flatten(0, -2), inputs.detach().flatten(0, -2)
    weight_grad = bias_grad = None
    weight_wanted, bias_wanted = ctx.needs_input_grad[-2:]
    if weight_wanted:
        factors = grad_rows.t(), input_rows
        weight_grad = ctx.queue.put(ctx.weight, *factors) if ctx.queue else torch.mm(*factors)
    if bias_wanted:
        bias_grad = grad_rows.sum(0)
    return weight_grad, bias_grad


def hides_communication(x: torch.Tensor) -> bool:
    """Say whether entered_linear pays for x: in training on CUDA, whose collectives run beside the
    products. On CPUs both would share the same cores."""
    return x.is_cuda and torch.is_grad_enabled()


def entered_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parallel: ParallelContext,
    *,
    queue: WeightQueue | AtOnce | None = None,
    align: bool = False,
) -> torch.Tensor:
    """Enter the tensor-parallel region with x and multiply, with the backward's communication under
    its products.

    Same as: linear(enter_tensor_parallel(x), weight, bias, queue=queue, align=align).

    While x's gradient is summed over the ranks (scattered, under sequence parallelism), the
    weight's is computed; and while x's is computed, this rank's part of x is gathered again. The
    sum takes the memory of the product that it is the sum of.
    """
    align = align and needs_alignment(x, len(weight))
    queue = queue if queue and queue.serves(x, weight) else None
    return _entered_linear(parallel, queue, align, x, weight, bias)


@untraced
def _entered_linear(parallel, queue, align, x, weight, bias) -> torch.Tensor:
    return _EnteredLinear.apply(parallel, queue, align, x, weight, bias)


class _EnteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parallel, queue, align, x, weight, bias):
        ctx.parallel, ctx.queue, ctx.align, ctx.weight = parallel, queue, align, weight
        ctx.save_for_backward(x)
        if parallel.sequence_parallel:
            x = all_gather_sequence(x, parallel.tp_group)
        return aligned_product(x, weight) if align else F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        (x,), x_grad = ctx.saved_tensors, None
        cut, group = ctx.parallel.sequence_parallel, ctx.parallel.tp_group
        grad = _aligned_rows(grad) if ctx.align else grad
        _, _, _, x_wanted, weight_wanted, _ = ctx.needs_input_grad
        gathered = begin_all_gather_sequence(x, group) if cut and weight_wanted else None
        if x_wanted:
            x_grad = grad @ ctx.weight
            summed = (begin_reduce_scatter_sequence if cut else begin_sum)(x_grad, group)
        gradients = _gradients_of_weights(ctx, grad, gathered() if gathered else x)
        if x_wanted:
            x_grad = summed()
        return None, None, None, x_grad, *gradients


def _aligned_rows(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient, [..., outputs], with aligned rows."""
    return aligned(grad.flatten(0, -2)).unflatten(0, grad.shape[:-1])


def split_heads(
    qkv: torch.Tensor, parts: Sequence[int], head_size: int, rotary: CosAndSin | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split q, k and v and turn q and k, keeping nothing but the cos and sin.

    Same as: attention.split_heads.

    The three gradients are written into one tensor, where autograd would make three and join them.
    """
    return _SplitHeads.apply(qkv, parts, head_size, *(rotary or (None, None)))


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, parts, head_size, cos, sin):
        ctx.parts, ctx.head_size = parts, head_size
        ctx.save_for_backward(cos, sin)
        heads = _views_of_heads(qkv, parts, head_size)
        if cos is None:
            return heads
        turned = _views_of_heads(torch.empty_like(qkv), parts, head_size)
        _copy_heads(heads, turned, cos, sin)
        return turned

    @staticmethod
    def backward(ctx, *grads):
        cos, sin = ctx.saved_tensors
        batch, _, sequence, _ = grads[0].shape
        grad = grads[0].new_empty(batch, sequence, sum(ctx.parts))
        heads = _views_of_heads(grad, ctx.parts, ctx.head_size)
        _copy_heads(grads, heads, cos, None if sin is None else -sin)
        return grad, None, None, None, None


def _views_of_heads(
    qkv: torch.Tensor, parts: Sequence[int], head_size: int
) -> tuple[torch.Tensor, ...]:
    """Return views [batch, heads, sequence, head_size] of each part of qkv."""
    return tuple(
        part.unflatten(-1, (-1, head_size)).transpose(1, 2) for part in qkv.split(parts, dim=-1)
    )


def _copy_heads(sources, targets, cos: torch.Tensor | None, sin: torch.Tensor | None) -> None:
    """Copy q, k and v to where the targets are, turning q and k by cos and sin, if given."""
    for name, source, target in zip("qkv", sources, targets, strict=True):
        if cos is None or name == "v":
            target.copy_(source)
        else:
            _turn(source, *_over_heads(cos, sin), target)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x by cos and sin, keeping those two alone: backward turns the gradient back.

    Same as: rotary.rotate.
    """
    return _Rotate.apply(x, *_over_heads(cos, sin))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, torch.empty_like(x))

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin, torch.empty_like(grad)), None, None


def _over_heads(cos: torch.Tensor, sin: torch.Tensor) -> CosAndSin:
    """Give [batch, sequence, head_size] a dimension for the heads; [sequence, head_size] fits."""
    return (cos[:, None], sin[:, None]) if cos.dim() == 3 else (cos, sin)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write x, turned by cos and sin, to `out`. Both expand to its shape, and each has two equal
    halves."""
    half = x.shape[-1] // 2
    first, second = x.split(half, dim=-1)
    torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(second, sin[..., :half], value=-1)
    out[..., half:].addcmul_(first, sin[..., :half])
    return out


def gated(inner: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Multiply activation(gate) by up, keeping `inner` alone, which both are parts of.

    Same as: mlp.gated.
    """
    return _Gated.apply(activation, inner)


class _Gated(torch.autograd.Function):
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
        torch.mul(grad, up, out=gate_grad)
        if ctx.activation is F.silu:
            silu_backward(gate_grad, gate, out=gate_grad)
        else:
            gate_grad.copy_(*torch.autograd.grad(activated, gate, gate_grad))
        return None, inner_grad


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise x, keeping x and one number a row, and not what it is normalised to.

    Same as: norm.rms_norm, but on CUDA. There torch has a kernel for it that reads and writes each
    number once. It rounds to x's dtype once, after the weight, where the formula rounds before it,
    too: of bfloat16's results a quarter differ, by the last bit, and the kernel's are the nearer.
    """
    if x.is_cuda and x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
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
