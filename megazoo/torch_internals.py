"""What megazoo uses of torch that is not its public interface: all of it, each behind a function.

A new version of torch may change any of it; what then breaks is mended here. Each docstring says
what the function does, and why nothing public will do. All of it works with torch 2.11 to 2.13.
"""

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "TorchDispatchMode",  # the only way to see every operator that runs, as FLOP counters do
    "allow_recompilations",
    "attention_kernel",
    "copy_each",
    "default_store",
    "flash_attention_operators",
    "flop_formulas",
    "fused_adamw",
    "has_gradient_hooks",
    "int8_product",
    "linear_by_onednn",
    "norm_of_each",
    "product_in_fp32",
    "profiler_runs",
    "renamed_collective",
    "results_are_new",
    "run_backward",
    "scale_each",
    "shares_storage",
    "silu_backward",
    "storage_key",
    "store_of_a_thread",
    "takes_int8_product",
    "timeout_of",
    "varlen_attention",
    "zero_each",
]

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]


def renamed_collective(new: str, old: str) -> Callable:
    """Return the collective of torch.distributed that is called `new` since torch 2.13.

    The older name is looked up only where the new one is missing: it warns, and will go.
    """
    return getattr(dist, new, None) or getattr(dist, old)


def default_store() -> dist.Store:
    """Return the store through which the ranks of this job met.

    init_process_group makes it from the launcher's environment, and nothing public gives it back.
    """
    return dist.distributed_c10d._get_default_store()


def store_of_a_thread() -> dist.Store:
    """Return the store through which the ranks met, by a connection that no other thread uses.

    One connection serves one call at a time: a thread that waits for a key keeps others waiting.
    Nothing public gives back the store that is copied here, and its `clone` has no stub.
    """
    return default_store().clone()  # pyrefly: ignore[missing-attribute]


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long a rank waits for the others in a group's operations on CPU tensors.

    torch takes a timeout with a new group, and has no function that gives it back.
    """
    return group._get_backend(torch.device("cpu")).options._timeout


def run_backward(output: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add the gradients of `output` to the leaves of its graph, as output.backward(gradient) does.

    torch.autograd.backward refuses an output whose memory was freed; a pipeline frees what it has
    sent, and keeps the graph.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def copy_each(targets: Tensors, sources: Tensors) -> None:
    """Copy each source into its target, whatever their dtypes: on CUDA in a few kernels for all.

    torch's public functions take one tensor at a time, a kernel each.
    """
    if targets:
        torch._foreach_copy_(targets, sources)


def scale_each(tensors: Tensors, factor: torch.Tensor | float) -> None:
    """Multiply each tensor in place, on CUDA by a few kernels for all.

    factor: a number, or a tensor of one on the same device.
    """
    if tensors:
        torch._foreach_mul_(tensors, factor)


def zero_each(tensors: Tensors) -> None:
    """Zero each tensor in place, on CUDA by a few kernels for all."""
    if tensors:
        torch._foreach_zero_(tensors)


def norm_of_each(tensors: Tensors) -> torch.Tensor:
    """Return the 2-norm of each tensor, summed and given in float64, [tensors]: on CUDA by a few
    kernels for all. At least one tensor is needed.

    torch.nn.utils.get_total_norm does so too, but sums in the tensors' own dtype.
    """
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64))


def fused_adamw(
    parameters: Tensors,
    gradients: Tensors,
    first_moments: Tensors,
    second_moments: Tensors,
    steps: Tensors,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: torch.Tensor | None,
) -> None:
    """Update parameters and moments in place by the kernel behind torch.optim.AdamW(fused=True).

    The constructor of that class imports torch._dynamo (70 MB), and the class updates whole
    parameters only, not a replica's part of them.
    """
    torch._fused_adamw_(
        parameters,
        gradients,
        first_moments,
        second_moments,
        [],
        steps,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
    )


def product_in_fp32(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return total + a b, in total's memory, or a b if there is no total: fp32, of factors of 16
    bits on CUDA.

    The products are public. But older versions want a total of the factors' own dtype, which says
    no documentation: there another kernel adds.
    """
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    if _adds_in_fp32(a.device, a.dtype):
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.add_(torch.mm(a, b, out_dtype=torch.float32))


@functools.cache
def _adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether a product of such factors can be added to an fp32 matrix: by trying it once."""
    factor = torch.zeros(16, 16, dtype=dtype, device=device)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # the latter of torch 2.11 for the device meta
        return False
    return True


def int8_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return (x W^T) * scale: bfloat16 [rows, inputs] -> [rows, outputs], of int8 weights [outputs,
    inputs] and a scale for each output, in bfloat16.

    Nothing public multiplies 8 bits without a copy of the weight that is wider.
    """
    return torch._weight_int8pack_mm(x, weight, scale)


def takes_int8_product(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Say whether int8_product multiplies such tensors: on CPUs, in blocks of 16, beyond whose ends
    it would read."""
    blocks = not any(size % 16 for size in weight.shape)
    return x.device.type == "cpu" and len(x) > 0 and weight.numel() > 0 and blocks


def linear_by_onednn(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return F.linear(x, weight, bias), of fp32 on a CPU, without a gradient, by oneDNN.

    F.linear gives fp32 to the BLAS library, and nothing public chooses another; a MkldnnLinear of
    torch.utils.mkldnn keeps a second copy of the weight.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Say whether someone has called the tensor's register_hook, which sees each gradient before it
    is added up.

    Nothing public tells it.
    """
    return bool(tensor._backward_hooks)


def allow_recompilations(count: int) -> None:
    """Let torch.compile compile one function anew so many times, if it would stop before.

    The setting has a public name, torch.compiler.config.recompile_limit, only in newer versions.
    Imports torch._dynamo (0.7 s, 70 MB).
    """
    import torch._dynamo

    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)


def profiler_runs() -> bool:
    """Say whether a profiler records this thread.

    Naming a block for it, which the public record_function does, costs time even where none does.
    """
    return torch.autograd._profiler_enabled()


def shares_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors are views of the same memory."""
    return storage_key(one.untyped_storage()) == storage_key(other.untyped_storage())


def silu_backward(grad: torch.Tensor, x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Write the gradient of silu's x to `out`, which may be `grad` itself.

    torch.autograd.grad computes the same and takes new memory for it.
    """
    return torch.ops.aten.silu_backward.grad_input(grad, x.detach(), grad_input=out)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that tells a living storage from all others.

    Each call of untyped_storage() makes a new Python object, and the address of the memory is 0 for
    every tensor on meta.
    """
    return storage._cdata


def flop_formulas() -> dict:
    """Return torch's formulas for the FLOPs of an operator, by its overload packet.

    The public FlopCounterMode counts with them, but nothing else that runs beside it.
    """
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def attention_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
) -> SDPBackend:
    """Return the kernel that scaled_dot_product_attention would choose on q's device, k and v
    having as many heads as q or fewer.

    The public torch.backends.cuda.can_use_flash_attention and the like know one kernel each, and
    not which of them is preferred.
    """
    causal = mask is None and q.shape[2] == k.shape[2]
    options = {"is_causal": causal, "enable_gqa": k.shape[1] < q.shape[1]}
    return SDPBackend(torch._fused_sdp_choice(q, k, v, mask, dropout, **options))


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    scale: float | None,
    key_boundaries: torch.Tensor | None = None,
    longest_of_keys: int | None = None,
    *,
    window: int | None = None,
) -> torch.Tensor:
    """Return the causal attention of sequences of several lengths, one after the other: [tokens,
    heads, head_size] of each.

    boundaries and the rest: as in megazoo.layers.Packed; where a sequence has fewer queries than
    keys, they are its last tokens. window: how many tokens a query looks at, itself included; all
    by default. It is public, but since torch 2.12 it must be told that there
    are fewer heads of keys than of queries, which the kernel has always taken. Imports
    torch._dynamo (0.7 s, 70 MB).
    """
    from torch.nn.attention.varlen import varlen_attn

    before = -1 if window is None else window - 1  # tokens; -1 stands for all
    options: dict[str, Any] = {"scale": scale, "window_size": (before, 0)}  # nothing after: causal
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = k.shape[1] < q.shape[1]
    if key_boundaries is None or longest_of_keys is None:
        key_boundaries, longest_of_keys = boundaries, longest
    y = varlen_attn(q, k, v, boundaries, key_boundaries, longest, longest_of_keys, **options)
    assert isinstance(y, torch.Tensor)  # nothing else is asked for
    return y


def flash_attention_operators() -> tuple[Callable, Callable]:
    """Return the operators of the attention that keeps no scores, and of its backward.

    The public scaled_dot_product_attention chooses another one on meta, where nothing is fast.
    """
    aten = torch.ops.aten
    return (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )


def results_are_new(operator: torch._ops.OpOverload) -> list[bool]:
    """Say of each result of an operator, as __torch_dispatch__ gets it, whether it is new memory.

    Else it is an argument, or a view of one. Only the operator's schema tells it.
    """
    return [returned.alias_info is None for returned in operator._schema.returns]


def writes_memory(operator: torch._ops.OpOverload) -> bool:
    """Say whether an operator, as __torch_dispatch__ gets it, runs a kernel; else it returns views,
    or memory that nobody has written yet."""
    name = operator.overloadpacket.__name__
    if name == "_unsafe_view" or name.startswith(("empty", "new_empty")):
        return False
    aliases = [returned.alias_info for returned in operator._schema.returns]
    return any(alias is None or alias.is_write for alias in aliases)


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dicts, each as often as it is there."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
