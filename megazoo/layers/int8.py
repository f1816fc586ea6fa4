"""Matrix products of linear layers whose weights are rounded to 8 bits: see `round_to_int8`."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megazoo.layers.product import Product
from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.cpu.products import product_dtype
from megazoo.torch_internals import int8_product, takes_int8_product

LARGEST = 127  # signed 8-bit integer
FEW_ROWS = 16  # up to this number, int8_product is faster than converting the weight


def rounded_to_int8(
    weight: torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [outputs, inputs] as int8, and the scale of each output, fp32 [outputs].

    weight = int8 * scale[:, None], up to rounding. scale = max |weight| / 127 over the full row,
    rounded to bfloat16. The inputs may be sharded over the ranks of `group`.
    """
    largest = weight.abs().amax(dim=1).float()
    all_reduce(largest, group, dist.ReduceOp.MAX)
    scale = (largest / LARGEST).bfloat16().float()
    scale.masked_fill_(scale == 0, 1)  # a row of zeros
    rounded = (weight / scale[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return rounded.to(torch.int8), scale


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return x W^T + b for a rounded weight: [..., inputs] -> [..., outputs].

    Same as: F.linear(x, weight * scale[:, None], bias). weight, scale: from `rounded_to_int8`. On a
    CPU, a few rows are multiplied as bfloat16 by a kernel that reads the 8-bit weight, if both
    sizes of the weight are multiples of 16. Otherwise, and on other devices, a temporary copy of
    the weight in the dtype of x is used.
    """
    rows = x.flatten(0, -2)
    if len(rows) <= FEW_ROWS and takes_int8_product(rows, weight):
        y = int8_product(rows.bfloat16(), weight, scale.bfloat16()).to(x.dtype)
    else:
        dtype = product_dtype(x)
        widened = (weight * scale[:, None]).to(dtype)  # float16 would overflow if scaled later
        y = F.linear(rows.to(dtype), widened).to(x.dtype)
    y = y.unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


class RoundedProduct(nn.Module, Product):
    """The product of a linear layer whose weight is rounded to 8 bits. The weight is not trained.

    scale: of the rows of the weight.
    """

    widens = False  # it chooses the dtype

    def __init__(self, scale: torch.Tensor):
        super().__init__()
        self.register_buffer("scale", scale, persistent=False)

    def _apply(self, fn, recurse: bool = True) -> "RoundedProduct":
        """Move the module. The scales stay fp32, also for half() and to()."""
        scale = self.scale
        super()._apply(fn, recurse)
        self.scale = scale.to(self.scale.device)
        return self

    def widened(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a rounded weight in fp32."""
        raise NotImplementedError

    def output(self, x, weight, bias=None, counts=None):
        dtype = product_dtype(x)  # float16 would overflow if scaled later
        y = F.linear(x.to(dtype), self.widened(weight).to(dtype)).to(x.dtype)
        return y if bias is None else y + bias

    def input_gradient(self, grad, weight, counts=None, total=None):
        return super().input_gradient(grad, self.widened(weight).to(grad.dtype), counts, total)


class Int8Product(RoundedProduct):
    """The product of a weight that is rounded to int8: see `int8_linear`."""

    def widened(self, weight):
        return weight * self.scale[:, None]

    def output(self, x, weight, bias=None, counts=None):
        return int8_linear(x, weight, self.scale, bias)
