"""Matrices whose rows begin where the tensor cores of GPUs want them.

A 16-bit product on CUDA takes up to three times as long if the rows of an operand or of the result
don't begin at multiples of 16 bytes, as those of logits over 50,257 tokens. Here such rows are
longer in memory than they are: a view leaves out what is between them, so that there is nothing to
mask in a loss, and no padding in a weight, an optimizer or a checkpoint.
"""

from collections.abc import Sequence

import torch

ELEMENTS = 64  # that a row's memory is a multiple of, where it is made here
LEAST = 8  # elements of 16 bits: of rows that are a multiple of so many, products are fast


def needs_alignment(x: torch.Tensor, columns: int) -> bool:
    """Say whether x's device is slow at products, in x's dtype, of rows of so many elements."""
    return columns % LEAST != 0 and _has_tensor_cores(x.device) and x.element_size() == 2


def empty_aligned(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return memory of this shape, of the dtype and device of `like`, with aligned rows if they
    need it; else contiguous."""
    *rows, columns = shape
    if not needs_alignment(like, columns):
        return like.new_empty(shape)
    return like.new_empty(*rows, -(-columns // ELEMENTS) * ELEMENTS)[..., :columns]


def aligned(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix, [rows, columns], or a copy with aligned rows if it needs them."""
    if not needs_alignment(matrix, matrix.stride(0)):
        return matrix
    return empty_aligned(matrix.shape, matrix).copy_(matrix)


def aligned_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T, [..., inputs] -> [..., outputs], with aligned rows. Autograd can't look into
    it."""
    y = empty_aligned((*x.shape[:-1], len(weight)), x)
    torch.mm(x.flatten(0, -2), weight.t(), out=y.flatten(0, -2))
    return y


def _has_tensor_cores(device: torch.device) -> bool:
    return device.type == "cuda"
