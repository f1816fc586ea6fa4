"""Choose the dtype and the library of matrix products on CPUs, by the CPU's instructions and the
shapes, so that equal runs on equal machines round equally."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megazoo.torch_internals import linear_by_onednn

WIDENED_ROWS = 128  # the minimum for products in fp32: see product_dtype
FEW_ROWS = 32  # the maximum for which another library is used: see linear_for
FEWEST_WEIGHTS = 1 << 18  # of such a matrix: oneDNN needs longer to start
# Instructions that multiply bfloat16, as Linux names them: of x86 and of ARM.
OF_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
CPU_FILE = Path("/proc/cpuinfo")


class Methods(NamedTuple):
    """The methods of products that are faster on a CPU.

    widened: compute products of bfloat16 in fp32. by_onednn: compute products of few rows in fp32
    with oneDNN instead of the BLAS library (MKL), which runs them on one core.
    """

    widened: bool
    by_onednn: bool


_agreed: Methods | None = None  # set by `follow`


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
    if few and weight.numel() >= FEWEST_WEIGHTS and methods().by_onednn:
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
    widened = x.shape[:-1].numel() >= WIDENED_ROWS and methods().widened
    return torch.float32 if widened else x.dtype


def methods() -> Methods:
    """Return the methods that `follow` set, otherwise those of this CPU."""
    if _agreed is not None:
        return _agreed
    has_both = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    return Methods(widened=not _has_bfloat16(), by_onednn=has_both)


def follow(agreed: Methods | None) -> None:
    """Set the methods of this process. None: those of its CPU.

    All ranks of a world use the methods of rank 0. If ranks rounded their products differently,
    values that are replicated on several ranks, such as norms, would diverge.
    """
    global _agreed
    _agreed = agreed


@functools.cache
def _has_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16. False if unknown."""
    try:
        text = CPU_FILE.read_text()
    except OSError:
        return False
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return bool(lines) and all(OF_BFLOAT16 & {*line.split()} for line in lines)
