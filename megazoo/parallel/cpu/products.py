"""Choose the dtype and the library of matrix products on CPUs, by the CPU's instructions and the
shapes, so that equal runs on equal machines round equally."""

import functools
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megazoo.torch_internals import linear_by_onednn, onednn_multiplies, packs_weights

WIDENED_ROWS = 128  # the minimum for products in fp32: see product_dtype
FEW_ROWS = 32  # the maximum for which MKL uses one core: see linear_for
FEWEST_WEIGHTS = 1 << 18  # of a matrix for oneDNN, which needs longer to start
BLOCK = 1 << 20  # weights that are converted at a time: see linear_by_blocks
FEWEST_ROWS_OF_BLOCKS = 8  # for fewer rows the conversion takes longer than it saves
# Instructions that multiply bfloat16, as Linux names them: of x86 and of ARM.
OF_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
INTEL = "GenuineIntel"
CPU_FILE = Path("/proc/cpuinfo")


class Methods(NamedTuple):
    """The methods of products that are faster on a CPU.

    widened: compute products of bfloat16 in fp32. by_onednn: compute products of few rows in fp32
    with oneDNN instead of the BLAS library (MKL), which runs them on one core. all_by_onednn:
    compute products of any number of rows with a weight in fp32 with oneDNN, because MKL uses
    AVX-512 only on processors from Intel. by_blocks: compute products of several rows of these
    dtypes by linear_by_blocks, because torch would read the weight once per row. attention: compute
    attention in bfloat16 by batched products: see blocked_attention.
    """

    widened: bool
    by_onednn: bool
    all_by_onednn: bool = False
    by_blocks: tuple[torch.dtype, ...] = ()
    attention: bool = False


_agreed: Methods | None = None  # set by `follow`


def linear_for(x: torch.Tensor, weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the function f(x, weight, bias) that multiplies x by a weight: F.linear or, if no
    gradient is recorded, oneDNN's function or linear_by_blocks.

    oneDNN is used for few rows in fp32 in inference mode (generation), and where
    `multiplies_by_onednn`. It sums in another order.
    """
    if torch.is_grad_enabled():
        return F.linear
    if _gains_from_blocks(x, weight):
        return linear_by_blocks
    if not _takes_onednn(x, weight.numel()):
        return F.linear
    few = torch.is_inference_mode_enabled() and x.shape[:-1].numel() <= FEW_ROWS
    use = methods().all_by_onednn or (few and methods().by_onednn)
    return linear_by_onednn if use else F.linear


def linear_by_blocks(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """F.linear in fp32 of bfloat16 or float16. The weight is converted by blocks of outputs, which
    fit into a CPU's cache."""
    wide, outputs = x.float(), []
    buffer = wide.new_empty(min(max(BLOCK, weight.shape[1]), weight.numel()))
    for block in weight.split(max(1, BLOCK // weight.shape[1])):
        block = buffer[: block.numel()].view_as(block).copy_(block)
        outputs.append(linear_for(wide, block)(wide, block))
    y = torch.cat(outputs, -1)
    return (y if bias is None else y.add_(bias)).to(x.dtype)


def _gains_from_blocks(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether linear_by_blocks is faster than F.linear, without gradients."""
    if x.dtype == torch.float32 or weight.dtype != x.dtype or x.device.type != "cpu":
        return False
    if x.shape[:-1].numel() < FEWEST_ROWS_OF_BLOCKS or weight.numel() < FEWEST_WEIGHTS:
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    return x.dtype in methods().by_blocks


def multiplies_by_onednn(x: torch.Tensor, weights: int) -> bool:
    """Return whether products of x, [..., features], with a matrix use oneDNN for any number of
    rows, in training as well. weights: the number of elements of the matrix."""
    return _takes_onednn(x, weights) and methods().all_by_onednn


def _takes_onednn(x: torch.Tensor, weights: int) -> bool:
    """Return whether oneDNN may be faster: in fp32 on a CPU, for large matrices."""
    if torch.compiler.is_compiling() or x.dtype != torch.float32 or x.device.type != "cpu":
        return False
    return weights >= FEWEST_WEIGHTS and not torch.is_autocast_enabled("cpu")


def gains_from_packing(weight: torch.Tensor) -> bool:
    """Return whether products of few rows with a weight are faster in oneDNN's layout: in bfloat16,
    on a CPU with instructions for it."""
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or weight.is_mkldnn:
        return False
    return weight.numel() >= FEWEST_WEIGHTS and not methods().widened and packs_weights()


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


def attends_by_products(q: torch.Tensor) -> bool:
    """Return whether attention in the dtype of q is faster as batched products of blocks."""
    if q.dtype != torch.bfloat16 or q.device.type != "cpu":
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    return methods().attention


def methods() -> Methods:
    """Return the methods that `follow` set, otherwise those of this CPU."""
    if _agreed is not None:
        return _agreed
    has_both = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    return Methods(
        widened=not _has_bfloat16(),
        by_onednn=has_both,
        all_by_onednn=has_both and _has_avx512_of_another_vendor(),
        by_blocks=tuple(filter(_reads_weights_per_row, (torch.bfloat16, torch.float16))),
        attention=_is_x86() and _has_bfloat16() and onednn_multiplies(torch.bfloat16),
    )


@functools.cache
def _reads_weights_per_row(dtype: torch.dtype) -> bool:
    """Return whether torch's products of bfloat16 or float16 read the weight once per row on this
    CPU. False on ARM, which has not been measured."""
    if not _is_x86() or onednn_multiplies(dtype):
        return False
    return dtype == torch.float16 or not _has_bfloat16()


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


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
    cores = [{*flags.split()} for flags in _lines_of_cpu("flags|Features")]
    return bool(cores) and all(OF_BFLOAT16 & core for core in cores)


@functools.cache
def _has_avx512_of_another_vendor() -> bool:
    """Return whether this CPU has AVX-512 and is not from Intel. False if unknown."""
    vendors = {name.strip() for name in _lines_of_cpu("vendor_id")}
    cores = [{*flags.split()} for flags in _lines_of_cpu("flags")]
    return bool(vendors - {INTEL} and cores) and all("avx512f" in core for core in cores)


def _lines_of_cpu(names: str) -> list[str]:
    """Return the values of each core under one of these names, a regular expression."""
    try:
        text = CPU_FILE.read_text()
    except OSError:
        return []
    return re.findall(rf"^(?:{names})\s*:(.*)$", text, re.MULTILINE)
