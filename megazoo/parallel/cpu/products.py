"""Choose the dtype and the library of matrix products on CPUs."""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megazoo.torch_internals import linear_by_onednn

WIDENED_ROWS = 128  # the minimum for products in fp32: see product_dtype
FEW_ROWS = 32  # the maximum for which another library is used: see linear_for
FEWEST_WEIGHTS = 1 << 16  # of such a matrix; a smaller one fits into a cache
FEATURES, PAIRS = 512, 5  # of the measurement, which takes about 20 ms
OUTPUTS = 8192  # of a matrix that does not fit into a core's cache, like those of a model
MARGIN = 1.25  # the factor by which the other must be faster, so that near ties end the same


class Verdicts(NamedTuple):
    """The faster methods on a CPU.

    widened: compute products of bfloat16 in fp32. by_onednn: compute products of few rows in fp32
    with oneDNN instead of the BLAS library (MKL), which runs them on one core.
    """

    widened: bool
    by_onednn: bool


_agreed: Verdicts | None = None  # set by `follow`


def linear_for(x: torch.Tensor, weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the function f(x, weight, bias) that multiplies x by a weight. It is F.linear, or
    oneDNN's function if that is faster on this CPU, for few rows in fp32 in inference mode
    (generation). oneDNN sums in another order.
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
    """Return the dtype in which to multiply x, [..., features], by a matrix: the dtype of x, or
    fp32 for bfloat16 on a CPU where fp32 is faster, including the conversions.

    The sums are equally accurate in fp32. With few rows, as in generation, converting the weights
    would take longer than multiplying by them.
    """
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return x.dtype
    widened = x.shape[:-1].numel() >= WIDENED_ROWS and verdicts().widened
    return torch.float32 if widened else x.dtype


def verdicts() -> Verdicts:
    """Return the faster methods: those that `follow` set, otherwise the result of a measurement,
    which runs once per process."""
    return _measured() if _agreed is None else _agreed


def follow(agreed: Verdicts | None) -> None:
    """Set the methods of this process. None: measure them.

    All ranks of a world use the methods of rank 0. If ranks rounded their products differently,
    values that are replicated on several ranks, such as norms, would diverge.
    """
    global _agreed
    _agreed = agreed


@functools.cache
def _measured() -> Verdicts:
    """Measure both methods of each product, with the threads of this process."""
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
    """Time two functions alternately, and return whether the first one is faster by MARGIN.

    It compares the shortest times, because other processes can only increase them.
    """

    def seconds(function: Callable) -> float:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    pairs = [(seconds(other), seconds(usual)) for _ in range(PAIRS)]
    of_other, of_usual = (min(times) for times in zip(*pairs, strict=True))
    return of_other * MARGIN < of_usual
