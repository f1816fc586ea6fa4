"""How a CPU multiplies: in which dtype, and by which library."""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megazoo.torch_internals import linear_by_onednn

WIDENED_ROWS = 128  # the fewest that are widened: see product_dtype
FEW_ROWS = 32  # the most for which another library is taken: see linear_for
FEWEST_WEIGHTS = 1 << 16  # of such a matrix; smaller ones are read from a cache in no time
FEATURES, PAIRS = 512, 5  # of what is timed: some twenty milliseconds in all
OUTPUTS = 8192  # of a matrix that a core's own cache does not keep, as a model's are not kept
MARGIN = 1.25  # by which the other way must be faster, so that a near tie falls the same each time


class Verdicts(NamedTuple):
    """What is faster on a CPU.

    widened: products of bfloat16 are made in fp32. by_onednn: products of few rows in fp32 are made
    by oneDNN, not by the BLAS library (MKL), which runs them on one core.
    """

    widened: bool
    by_onednn: bool


_agreed: Verdicts | None = None  # what `follow` was told


def linear_for(x: torch.Tensor, weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the function f(x, weight, bias) that multiplies x by a weight: F.linear, or oneDNN's,
    which sums in another order, where a few rows in fp32 are multiplied in inference mode, as
    generation does, on a CPU where that is faster.
    """
    few = (
        not torch.compiler.is_compiling()
        and torch.is_inference_mode_enabled()
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.shape[:-1].numel() <= FEW_ROWS
    )
    if few and weight.numel() >= FEWEST_WEIGHTS and verdicts().by_onednn:
        return linear_by_onednn
    return F.linear


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which to multiply x, [..., features], by a matrix: its own, except for
    bfloat16 on a CPU that is faster in fp32, the conversions included.

    fp32 sums as exactly. With few rows, as in generation, the weights would take longer to widen
    than to multiply.
    """
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return x.dtype
    widened = x.shape[:-1].numel() >= WIDENED_ROWS and verdicts().widened
    return torch.float32 if widened else x.dtype


def verdicts() -> Verdicts:
    """Return what is faster here: as `follow` was told, or by a measurement, one in the life of a
    process."""
    return _measured() if _agreed is None else _agreed


def follow(agreed: Verdicts | None) -> None:
    """Make these verdicts this process's; None leaves them to a measurement.

    All ranks of a world follow rank 0: if they rounded their products differently, what several
    ranks compute alike, such as norms, would drift apart.
    """
    global _agreed
    _agreed = agreed


@functools.cache
def _measured() -> Verdicts:
    """Time both ways of each product, with the threads of this process."""
    x, weight = (
        torch.ones(rows, FEATURES, dtype=torch.bfloat16) for rows in (WIDENED_ROWS, FEATURES)
    )
    row, matrix = torch.ones(1, FEATURES), torch.ones(OUTPUTS, FEATURES)
    with torch.no_grad():
        widened = _is_faster(
            lambda: F.linear(x.float(), weight.float()).bfloat16(),
            lambda: F.linear(x, weight),
        )
        by_onednn = torch.backends.mkldnn.is_available() and _is_faster(
            lambda: linear_by_onednn(row, matrix, None), lambda: F.linear(row, matrix)
        )
    return Verdicts(widened, by_onednn)


def _is_faster(other: Callable, usual: Callable) -> bool:
    """Time two functions in turn, and say whether the first one is faster, by MARGIN.

    The shortest times are compared: other processes can only make them longer.
    """

    def seconds(function: Callable) -> float:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    pairs = [(seconds(other), seconds(usual)) for _ in range(PAIRS)]
    of_other, of_usual = (min(times) for times in zip(*pairs, strict=True))
    return of_other * MARGIN < of_usual
