"""The products of a weight with the input of a layer, and with its gradients: see `Product`."""

from typing import Any

import torch
import torch.nn.functional as F

from megazoo.layers.aligned import aligned, aligned_product
from megazoo.parallel.cpu.products import linear_for, multiplies_by_onednn, product_dtype
from megazoo.parallel.deferred import add_product
from megazoo.torch_internals import linear_by_onednn

KERNEL_BYTES = 16  # the kernel for groups needs rows whose bytes are a multiple of this


class Product:
    """The three matrix products of a weight W: y = x W^T + b, and in backward g W and g^T x.

    For another arithmetic, assign an instance of a subclass to the `product` of a parallel linear
    layer or of stacked experts. Heads, routers and adapters use PLAIN.

    counts: None for a weight [outputs, inputs]. Otherwise the weight is a stack of matrices,
    [groups, outputs, inputs], and counts has the number of rows of each, int64 [groups]; there may
    be none. In train_batch and eval_batch, all ranks of tp and of the token axis call the methods
    of a layer in the same order, so that they may communicate. In model(...) and generate, only the
    ranks of one replica call them together.

    Class attributes:
        widens: for a weight [outputs, inputs], the methods get fp32 factors where CPUs multiply
            bfloat16 faster as fp32. For a stack, they get the dtype of the activations.
    """

    widens = True

    def output(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x W^T + b: [..., inputs] -> [..., outputs]; for a stack [rows, inputs] -> [rows,
        outputs], without a bias. It must be new memory: callers change it in place."""
        if counts is not None:
            return _grouped(x, weight, counts)
        return linear_for(x, weight)(x, weight, bias)

    def gradient(self, grad: torch.Tensor) -> Any:
        """Return the gradient of the output, [rows, outputs], in any form: only the following
        methods get it."""
        return grad

    def input_gradient(
        self,
        grad: torch.Tensor,
        weight: torch.Tensor,
        counts: torch.Tensor | None = None,
        total: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the gradient of the input, grad W: [rows, outputs] -> [rows, inputs], in new
        memory.

        total: that of other weights with the same input, to which this one is added in place.
        """
        if counts is not None:
            return _grouped(grad, weight.mT, counts)
        if total is None:
            return linear_for(grad, weight)(grad, weight.t())
        return total.addmm_(grad, weight)

    def weight_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the gradient of the weight, grad^T x, with the shape of the weight. grad: [rows,
        outputs]. x: [rows, inputs]."""
        if counts is not None:
            return _grouped_sums(grad, x, counts)
        return torch.mm(grad.t(), x)

    def add_weight_gradient(
        self,
        total: torch.Tensor | None,
        grad: torch.Tensor,
        x: torch.Tensor,
        counts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return total + weight_gradient(grad, x), in fp32, in total's memory if there is one. A
        subclass may override it to add in the kernel that multiplies."""
        found = self.weight_gradient(grad, x, counts)
        return found.float() if total is None else total.add_(found)


class PlainProduct(Product):
    """The products in the dtype of the factors."""

    def __reduce__(self):
        return "PLAIN"  # a copy is the same object

    def add_weight_gradient(self, total, grad, x, counts=None):
        if counts is not None:
            return super().add_weight_gradient(total, grad, x, counts)
        return add_product(total, grad.t(), x)  # CUDA adds in the kernel that multiplies


class AlignedProduct(PlainProduct):
    """The products of a weight whose number of outputs is slow on a GPU, without a bias: see
    aligned.py."""

    def __reduce__(self):
        return "ALIGNED"

    def output(self, x, weight, bias=None, counts=None):
        assert bias is counts is None
        return aligned_product(x, weight)

    def gradient(self, grad):
        return aligned(grad)


class PackedProduct(Product):
    """The product of a weight in oneDNN's layout, without gradients: see pack_weights."""

    widens = False

    def output(self, x, weight, bias=None, counts=None):
        assert counts is None  # experts are not packed
        return linear_by_onednn(x, weight, bias)


PLAIN, ALIGNED, PACKED = PlainProduct(), AlignedProduct(), PackedProduct()


def grouped_linear_formula(
    x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Multiply each group of rows with another matrix: see `megazoo.layers.grouped`."""
    groups = list(zip(x.split(counts.tolist()), weight.unbind(), strict=True))
    if not torch.is_grad_enabled():  # in training each matrix needs a gradient
        groups = [group for group in groups if len(group[0])] or groups[:1]
    return torch.cat([linear_for(rows, matrix)(rows, matrix) for rows, matrix in groups])


def _grouped(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if x.is_meta:  # the counts have no values; one matrix costs as much as several
        return F.linear(x, weight[0])
    if multiplies_by_onednn(x, weight.shape[1:].numel()) or not _kernel_accepts(
        x, *weight.shape[1:]
    ):
        return grouped_linear_formula(x, weight, counts)
    dtype = product_dtype(x)  # CPUs may multiply bfloat16 faster as fp32
    ends = counts.cumsum(0).int()
    return F.grouped_mm(x.to(dtype), weight.to(dtype).mT, offs=ends).to(x.dtype)


def _grouped_sums(grad: torch.Tensor, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if x.is_meta:
        return (grad.t() @ x).expand(len(counts), -1, -1).contiguous()
    if not _kernel_accepts(x, grad.shape[1], x.shape[1]):
        groups = zip(grad.split(counts.tolist()), x.split(counts.tolist()), strict=True)
        return torch.stack([rows.t() @ inputs for rows, inputs in groups])
    dtype, ends = product_dtype(x), counts.cumsum(0).int()
    return F.grouped_mm(grad.to(dtype).t(), x.to(dtype), offs=ends)


def _kernel_accepts(x: torch.Tensor, *sizes: int) -> bool:
    aligned = all(size * x.element_size() % KERNEL_BYTES == 0 for size in sizes)
    return aligned and len(x) > 0
