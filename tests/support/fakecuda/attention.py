"""Which kernel torch chooses for attention on CUDA: its rules, as of torch 2.13."""

import torch
from torch.overrides import TorchFunctionMode

from tests.support.fakecuda.audit import audit

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
NUMBERS = {"math": 0, "flash": 1, "efficient": 2, "cudnn": 3}  # as in torch.nn.attention.SDPBackend


def kernels(q, k, v, mask, is_causal: bool, enable_gqa: bool) -> dict[str, str]:
    """Return the kernel on Hopper (sm90) and on Ampere (sm80).

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    half, size = q.dtype in HALF, q.shape[-1]
    same_heads = q.shape[1] == k.shape[1]
    dense = all(t.stride(-1) == 1 for t in (q, k, v)) and (mask is None or mask.dim() in (2, 4))
    groups = same_heads or enable_gqa
    cudnn = half and dense and groups and size <= 128 and size % 8 == 0 and k.shape[2] > 1
    cudnn = cudnn and torch.backends.cuda.cudnn_sdp_enabled()
    flash = half and dense and groups and mask is None and size <= 256
    flash = flash and not (is_causal and q.shape[2] != k.shape[2])
    efficient = dense and same_heads and size % (8 if half else 4) == 0
    rest = "flash" if flash else "efficient" if efficient else "math"
    return {"sm90": "cudnn" if cudnn else rest, "sm80": rest}


class Chooser(TorchFunctionMode):
    """Notes the choice for each call of scaled_dot_product_attention, and runs flash in its place.
    Says it before a call, too, of the device that torch.cuda.get_device_capability tells."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        attention = torch.nn.functional.scaled_dot_product_attention
        if function is attention and args[0].device.type == "cuda":
            return self.attend(*args, **kwargs)
        if function is torch._fused_sdp_choice and args[0].device.type == "cuda":
            q, k, v, mask, _ = args
            chosen = kernels(q, k, v, mask, kwargs["is_causal"], kwargs["enable_gqa"])
            return NUMBERS[chosen["sm90" if torch.cuda.get_device_capability()[0] >= 9 else "sm80"]]
        return function(*args, **kwargs)

    def attend(
        self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        if attn_mask is not None and attn_mask.device != q.device:
            audit.fault("an attention mask on another device")
        if attn_mask is not None and attn_mask.dtype not in (torch.bool, q.dtype):
            audit.fault(f"an attention mask of {attn_mask.dtype} for {q.dtype}")
        chosen = kernels(q, k, v, attn_mask, is_causal, enable_gqa)
        shape = None if attn_mask is None else list(attn_mask.shape)
        what = f"q {list(q.shape[1:])} k {list(k.shape[1:])} {str(q.dtype)[6:]} mask {shape}"
        audit.attention[f"sm90 {chosen['sm90']}, sm80 {chosen['sm80']}: {what}"] += 1
        if q.shape[1] != k.shape[1]:  # the operator below has no groups
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        operator = aten._scaled_dot_product_flash_attention
        return operator(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
