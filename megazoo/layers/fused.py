"""Memory-saving fused versions of the plain formulas of the layers.

A fused version computes the same as its formula ("Same as"). It saves less for backward, or writes
results directly to where they are needed. tests/unit/layers/test_fused.py compares values and
gradients. Those of linear layers are in matmul.py, those of the cross-entropies in
fused_cross_entropy.py.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from megazoo.torch_internals import shares_storage, silu_backward

CosAndSin = tuple[torch.Tensor, torch.Tensor]


def replaced_by(twin: Callable) -> Callable[[Callable], Callable]:
    """Decorate a plain formula so that calls run `twin`, which computes the same and saves less for
    backward.

    Under torch.compile the formula runs, and the compiler decides what is saved.
    """

    def decorate(formula: Callable) -> Callable:
        @functools.wraps(formula)
        def run(*args, **kwargs):
            if torch.compiler.is_compiling():
                return formula(*args, **kwargs)
            return twin(*args, **kwargs)

        return run

    return decorate


def split_heads(
    qkv: torch.Tensor, parts: Sequence[int], head_size: int, rotary: CosAndSin | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split q, k and v and rotate q and k, saving only the cos and sin.

    Same as: qkv.split_heads.

    The heads of q and k are next to each other and are rotated together. The three gradients are
    written into one tensor; autograd would concatenate three. Without gradients, v is a view.
    """
    if torch.is_grad_enabled():
        return _SplitHeads.apply(qkv, parts, head_size, *(rotary or (None, None)))
    q, k, v = _views_of_heads(qkv, parts, head_size)
    if rotary is not None:
        turned = _turn_queries_and_keys(qkv, parts, head_size, *rotary)
        q, k = turned.split([q.shape[1], k.shape[1]], dim=1)
    return q, k, v


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, parts, head_size, cos, sin):
        ctx.parts, ctx.head_size = parts, head_size
        ctx.save_for_backward(cos, sin)
        heads = _views_of_heads(qkv, parts, head_size)
        if cos is None:
            return heads
        whole = torch.empty_like(qkv)
        turned = _views_of_heads(whole, parts, head_size)
        _turn_queries_and_keys(qkv, parts, head_size, cos, sin, whole)
        turned[2].copy_(heads[2])
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


def _turn_queries_and_keys(
    qkv: torch.Tensor,
    parts: Sequence[int],
    head_size: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate the heads of q and k in qkv: [batch, heads of q and of k, sequence, head_size]. out:
    memory for the result, which begins like qkv; by default it is new."""
    features = parts[0] + parts[1]
    x = qkv[..., :features]
    target = torch.empty_like(x) if out is None else out[..., :features]
    x, target = (part.unflatten(-1, (-1, head_size)).transpose(1, 2) for part in (x, target))
    return _turn(x, *_over_heads(cos, sin), target)


def _copy_heads(sources, targets, cos: torch.Tensor | None, sin: torch.Tensor | None) -> None:
    """Copy q, k and v to the targets; rotate q and k if there are cos and sin."""
    for name, source, target in zip("qkv", sources, targets, strict=True):
        if cos is None or sin is None or name == "v":
            target.copy_(source)
        else:
            _turn(source, *_over_heads(cos, sin), target)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x by cos and sin, saving only those two: backward rotates the gradient back.

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
    """Add a dimension for the heads to [batch, sequence, head_size]; [sequence, head_size]
    broadcasts."""
    return (cos[:, None], sin[:, None]) if cos.dim() == 3 else (cos, sin)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write x to `out`, with its first features rotated by cos and sin. Both expand to the shape of
    the rotated features, and each has two equal halves."""
    size = cos.shape[-1]
    half = size // 2
    first, second, rest = x.tensor_split([half, size], dim=-1)
    torch.mul(x[..., :size], cos, out=out[..., :size])
    out[..., :half].addcmul_(second, sin[..., :half], value=-1)
    out[..., half:size].addcmul_(first, sin[..., :half])
    if rest.shape[-1]:
        out[..., size:] = rest
    return out


def stack_pair(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Stack two tensors, as a view if they are parts of one tensor, such as keys and values of one
    projection. The result is only read.

    Same as: static_cache.stack_pair.
    """
    distance = v.storage_offset() - k.storage_offset()
    same = k.shape == v.shape and k.stride() == v.stride() and k.dtype == v.dtype
    if same and distance > 0 and shares_storage(k, v):
        return k.as_strided((2, *k.shape), (distance, *k.stride()))
    return torch.stack([k, v])


def gated(inner: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Multiply activation(gate) by up, saving only `inner`, which has both.

    Same as: mlp.gated.
    """
    if not torch.is_grad_enabled():
        return _product_of_halves(activation, inner)
    return _Gated.apply(activation, inner)


def _product_of_halves(
    activation: Callable[[torch.Tensor], torch.Tensor], inner: torch.Tensor
) -> torch.Tensor:
    gate, up = inner.chunk(2, dim=-1)
    activated = activation(gate)
    if shares_storage(activated, inner):  # the activation is the identity
        return activated * up
    return activated.mul_(up)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, activation, inner):
        ctx.activation = activation
        ctx.save_for_backward(inner)
        return _product_of_halves(activation, inner)

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
    """Normalise x, saving x and one number per row, not the normalised x.

    Same as: norm.rms_norm, except on CUDA, where a kernel of torch reads and writes each element
    once. It rounds to the dtype of x once, after the weight; the formula also rounds before it. In
    bfloat16 a quarter of the results differ in the last bit, and those of the kernel are more
    accurate.
    """
    if x.is_cuda and x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    if not torch.is_grad_enabled():  # calling the function takes longer than a kernel
        return _normalised(x, weight, eps)[0]
    return _RMSNorm.apply(x, weight, eps)


def _normalised(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised x, and the number of each row that it was scaled by."""
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    y = (wide * scale).to(x.dtype)
    return (y.mul_(weight) if weight.dtype == y.dtype else weight * y), scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        y, scale = _normalised(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normalised = x.float() * scale
        weight_grad = (grad * normalised.to(x.dtype)).flatten(0, -2).sum(0)
        grad = (grad * weight).float()
        x_grad = (grad - normalised * (grad * normalised).mean(-1, keepdim=True)).mul_(scale)
        return x_grad.to(x.dtype), weight_grad, None
