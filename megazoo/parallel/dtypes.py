"""The names that users can give for the dtypes of weights."""

import torch

from megazoo.errors import UserError

NAMED = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def dtype_named(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype of weights for a user's setting; None for "auto" and None.

    dtype: a torch.dtype of 16 bits or more, or a name such as "bfloat16", "bf16", "torch.bfloat16".
    Raises UserError, with the names, for any other value.
    """
    if dtype is None or dtype == "auto":
        return None
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, str | torch.dtype) else None
    if name not in NAMED:
        raise UserError(f"dtype {dtype!r} is not supported: use auto, {', '.join(NAMED)}")
    return NAMED[name]
