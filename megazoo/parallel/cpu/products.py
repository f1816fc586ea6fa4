"""The dtype in which a CPU multiplies matrices."""

import functools
import time

import torch
import torch.nn.functional as F

WIDENED_ROWS = 128  # the fewest that are widened: see product_dtype
FEATURES, PAIRS = 512, 5  # of what is timed: a few milliseconds in all
MARGIN = 1.25  # by which fp32 must be faster, so that a near tie falls the same way each time

_agreed: bool | None = None  # what `follow` was told


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which to multiply x, [..., features], by a matrix: its own, except for
    bfloat16 on a CPU that is faster in fp32, the conversions included.

    fp32 sums as exactly. With few rows, as in generation, the weights would take longer to widen
    than to multiply.
    """
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return x.dtype
    widened = x.shape[:-1].numel() >= WIDENED_ROWS and widening_pays()
    return torch.float32 if widened else x.dtype


def widening_pays() -> bool:
    """Say whether products of bfloat16 are made in fp32 here: as `follow` was told, or by a
    measurement, one in the life of a process."""
    return _measured() if _agreed is None else _agreed


def follow(verdict: bool | None) -> None:
    """Make a verdict this process's; None leaves it to a measurement.

    All ranks of a world follow rank 0: if they rounded their products differently, what several
    ranks compute alike, such as norms, would drift apart.
    """
    global _agreed
    _agreed = verdict


@functools.cache
def _measured() -> bool:
    """Time a product in bfloat16 and one in fp32 in turn, with the threads of this process.

    The shortest times are compared: other processes can only make them longer.
    """
    x, weight = (
        torch.ones(rows, FEATURES, dtype=torch.bfloat16) for rows in (WIDENED_ROWS, FEATURES)
    )

    def seconds(dtype: torch.dtype) -> float:
        began = time.perf_counter()
        F.linear(x.to(dtype), weight.to(dtype)).to(x.dtype)
        return time.perf_counter() - began

    with torch.no_grad():
        pairs = [(seconds(torch.bfloat16), seconds(torch.float32)) for _ in range(PAIRS)]
    as_it_is, widened = (min(times) for times in zip(*pairs, strict=True))
    return widened * MARGIN < as_it_is
