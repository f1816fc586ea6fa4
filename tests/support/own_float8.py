"""A custom product, which emulates float8: every factor is rounded to e4m3 with one scale per
tensor, which all ranks that share the tensor agree on."""

from collections.abc import Collection

import torch
import torch.distributed as dist

from megazoo.layers.product import PLAIN, Product
from megazoo.parallel.collectives import all_reduce_over

LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Float8(Product):
    """The products of factors that are rounded to float8.

    ctx: its ranks along tp and the token axis use a common scale. unreduced: of "x", "weight"
    and "grad", the factors whose largest value is not reduced over the ranks: a bug.
    """

    def __init__(self, ctx, unreduced: Collection[str] = ()):
        self.ctx, self.unreduced = ctx, unreduced

    def rounded(self, factor: torch.Tensor, what: str) -> torch.Tensor:
        """Return a factor, which may be empty, rounded to float8 and back."""
        largest = factor.abs().amax().float() if factor.numel() else torch.zeros(())
        if what not in self.unreduced:
            all_reduce_over(largest, [self.ctx.tp, self.ctx.token_axis], dist.ReduceOp.MAX)
        scale = LARGEST / largest.clamp(min=1e-12)
        rounded = (factor.detach() * scale).to(torch.float8_e4m3fn).float() / scale
        return rounded.to(factor.dtype)

    def output(self, x, weight, bias=None, counts=None):
        return PLAIN.output(self.rounded(x, "x"), self.rounded(weight, "weight"), bias, counts)

    def gradient(self, grad):
        return self.rounded(grad, "grad")

    def input_gradient(self, grad, weight, counts=None, total=None):
        return PLAIN.input_gradient(grad, self.rounded(weight, "weight"), counts, total)

    def weight_gradient(self, grad, x, counts=None):
        return PLAIN.weight_gradient(grad, self.rounded(x, "x"), counts)


def multiply_in_float8(model: torch.nn.Module, unreduced: Collection[str] = ()):
    """Let all parallel linear layers and experts of a model multiply in float8; return the
    model."""
    for layer in model.modules():
        if isinstance(getattr(layer, "product", None), Product):
            layer.product = Float8(layer.ctx, unreduced)
    return model
