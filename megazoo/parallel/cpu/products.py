"""In which dtype a CPU multiplies matrices."""

import functools

import torch

from megazoo.torch_internals import has_amx

WIDENED_ROWS = 128  # see product_dtype


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """What x, [..., features], is multiplied as: its own dtype, but for bfloat16 on a CPU without
    AMX.

    There fp32 is 1.6 x as fast (245 against 145 GFLOP/s on two cores with AVX-512's bfloat16), and
    sums as exactly. Of few rows, as in generation, the weights would take longer to widen than to
    multiply.
    """
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return x.dtype
    return (
        torch.float32
        if x.shape[:-1].numel() >= WIDENED_ROWS and not _has_bfloat16_units()
        else x.dtype
    )


@functools.cache
def _has_bfloat16_units() -> bool:
    """AMX, on x86; of other CPUs torch does not tell, and they multiply it as it is."""
    return not torch.backends.cpu.get_cpu_capability().startswith("AVX") or has_amx()
