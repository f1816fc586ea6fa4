"""Matrices whose rows are aligned for the tensor cores of GPUs.

A 16-bit matrix product on CUDA takes up to three times as long if the rows of an operand or of the
result don't start at multiples of 16 bytes, as in logits over 50,257 tokens. The functions here
allocate longer rows and return a view without the extra elements. So the loss needs no mask, and
weights, optimizer states and checkpoints have no padding.
"""

from collections.abc import Sequence

import torch

ELEMENTS = 64  # the memory of a row is a multiple of this number of elements
LEAST = 8  # products of rows with a multiple of this number of 16-bit elements are fast


def needs_alignment(x: torch.Tensor, columns: int) -> bool:
    """Return whether products of rows of this length are slow on the device and in the dtype of
    x."""
    return columns % LEAST != 0 and _has_tensor_cores(x.device) and x.element_size() == 2


def empty_aligned(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return uninitialised memory of this shape, with the dtype and device of `like`, with aligned
    rows if they are needed; otherwise contiguous."""
    *rows, columns = shape
    if not needs_alignment(like, columns):
        return like.new_empty(shape)
    return like.new_empty(*rows, -(-columns // ELEMENTS) * ELEMENTS)[..., :columns]


def aligned(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix [rows, columns], or a copy with aligned rows if it needs them."""
    if not needs_alignment(matrix, matrix.stride(0)):
        return matrix
    return empty_aligned(matrix.shape, matrix).copy_(matrix)


def aligned_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T, [..., inputs] -> [..., outputs], with aligned rows. Autograd does not record
    it."""
    y = empty_aligned((*x.shape[:-1], len(weight)), x)
    torch.mm(x.flatten(0, -2), weight.t(), out=y.flatten(0, -2))
    return y


def _has_tensor_cores(device: torch.device) -> bool:
    return device.type == "cuda"
