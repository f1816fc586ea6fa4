"""Every use of torch's private interface in megazoo, each behind a function.

If a new version of torch changes one, only this module needs a change. Each docstring describes the
function and why no public interface suffices. Everything works with torch 2.11 to 2.13.
"""

import ctypes
import functools
import inspect
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "TorchDispatchMode",  # the only way to observe every operator, as FLOP counters do
    "allow_recompilations",
    "attention_kernel",
    "copy_each",
    "default_store",
    "end_openmp_threads",
    "factors_are_bfloat16",
    "flash_attention_operators",
    "float8_product",
    "flop_formulas",
    "fused_adamw",
    "has_gradient_hooks",
    "int8_product",
    "linear_by_onednn",
    "norm_of_each",
    "onednn_multiplies",
    "packed_weight",
    "packs_weights",
    "paged_attention",
    "product_in_fp32",
    "profiler_runs",
    "renamed_collective",
    "results_are_new",
    "run_backward",
    "scale_each",
    "shares_storage",
    "silu_backward",
    "skip_frames",
    "softmax_backward",
    "storage_key",
    "store_of_a_thread",
    "stored_in_file",
    "takes_float8_product",
    "takes_int8_product",
    "takes_pages",
    "timeout_of",
    "varlen_attention",
    "zero_each",
]

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]


def renamed_collective(new: str, old: str) -> Callable:
    """Return the collective of torch.distributed with the name `new`, since torch 2.13.

    The name `old` is used only if `new` does not exist: it is deprecated and warns.
    """
    return getattr(dist, new, None) or getattr(dist, old)


def default_store() -> dist.Store:
    """Return the store through which the ranks of this job connected.

    init_process_group creates it from the launcher's environment. No public function returns it.
    """
    return dist.distributed_c10d._get_default_store()


def store_of_a_thread() -> dist.Store:
    """Return the store of the job with a separate connection for the calling thread.

    A connection handles one call at a time: a thread that waits for a key blocks the others. No
    public function returns the store that is cloned here, and its `clone` has no stub.
    """
    return default_store().clone()  # pyrefly: ignore[missing-attribute]


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of a group's operations on CPU tensors.

    torch accepts a timeout for a new group, but has no public function that returns it.
    """
    return group._get_backend(torch.device("cpu")).options._timeout


def run_backward(output: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add the gradients of `output` to the leaves of its graph, like output.backward(gradient).

    torch.autograd.backward raises an error if the memory of the output was freed. Pipelines free
    activations after sending them, and keep the graph.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def copy_each(targets: Tensors, sources: Tensors) -> None:
    """Copy each source into its target, with any dtypes. On CUDA, a few kernels copy all tensors.

    torch's public functions copy one tensor per call and kernel.
    """
    if targets:
        torch._foreach_copy_(targets, sources)


def scale_each(tensors: Tensors, factor: torch.Tensor | float) -> None:
    """Multiply each tensor in place. On CUDA, a few kernels process all tensors.

    factor: a number, or a tensor with one element on the same device.
    """
    if tensors:
        torch._foreach_mul_(tensors, factor)


def zero_each(tensors: Tensors) -> None:
    """Zero each tensor in place. On CUDA, a few kernels process all tensors."""
    if tensors:
        torch._foreach_zero_(tensors)


def norm_of_each(tensors: Tensors) -> torch.Tensor:
    """Return the 2-norm of each tensor, float64 [tensors], accumulated in float64.

    At least one tensor is required. On CUDA, a few kernels process all tensors. The public
    torch.nn.utils.get_total_norm accumulates in the dtype of the tensors.
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
    """Update parameters and moments in place with the kernel of torch.optim.AdamW(fused=True).

    The constructor of that class imports torch._dynamo (70 MB). The class updates only complete
    parameters, not a replica's shard of a parameter.
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
    """Return the fp32 sum total + a b, or a b if total is None. The factors have 16 bits on CUDA.

    The sum is written to total. The matrix products are public. Older versions of torch require a
    total with the dtype of the factors, which is not documented: with these, a separate kernel
    adds.
    """
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    if _adds_in_fp32(a.device, a.dtype):
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.add_(torch.mm(a, b, out_dtype=torch.float32))


@functools.cache
def _adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products of this dtype can be added to an fp32 matrix, by one trial."""
    factor = torch.zeros(16, 16, dtype=dtype, device=device)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # TypeError: torch 2.11 on the device meta
        return False
    return True


def int8_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return (x W^T) * scale, bfloat16 [rows, outputs], for int8 weights.

    Public functions need a copy of the weight in a wider dtype.

    Args:
        x: bfloat16 [rows, inputs].
        weight: int8 [outputs, inputs].
        scale: bfloat16 [outputs].
    """
    return torch._weight_int8pack_mm(x, weight, scale)


def takes_int8_product(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether int8_product supports these tensors: on CPUs, with sizes that are multiples of
    16, since it reads the weight in blocks of 16."""
    blocks = not any(size % 16 for size in weight.shape)
    return x.device.type == "cpu" and len(x) > 0 and weight.numel() > 0 and blocks


def float8_product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """Return (a / scale_a) (b / scale_b)^T, [rows, columns], for float8 matrices.

    torch 2.11 has no public function for a scale per row.

    Args:
        a: float8 [rows, inner], contiguous.
        b: float8 [columns, inner], contiguous.
        scale_a, scale_b: fp32 [1, 1]; or [rows, 1] and [columns, 1].
        dtype: of the result.
        fast: accumulate with fewer bits.
    """
    scales = {"scale_a": scale_a.reciprocal(), "scale_b": scale_b.reciprocal().t()}
    return torch._scaled_mm(a, b.t(), **scales, out_dtype=dtype, use_fast_accum=fast)


def takes_float8_product(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, is_rowwise: bool
) -> bool:
    """Return whether float8_product supports these matrices: on CUDA devices with float8, with
    sizes that are multiples of 16; with a scale per row only for bfloat16."""
    return (
        a.is_cuda
        and torch.cuda.get_device_capability(a.device) >= (8, 9)
        and not any(size % 16 for size in (*a.shape, *b.shape))
        and a.numel() > 0 < b.numel()
        and (dtype == torch.bfloat16 or not is_rowwise)
    )


def linear_by_onednn(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return F.linear(x, weight, bias) in fp32 on a CPU, without a gradient, computed with oneDNN;
    or in bfloat16, for a packed weight.

    F.linear uses the BLAS library for fp32, and no public function selects another library.
    MkldnnLinear of torch.utils.mkldnn stores a second copy of the weight.
    """
    y = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    # not a view for autograd: callers change it in place
    return y if torch.is_inference_mode_enabled() else y.detach()


def packed_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a bfloat16 weight in oneDNN's layout for products of few rows: see linear_by_onednn.

    The public to_mkldnn() keeps rows one after the other.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, 1)


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies bfloat16 or float16 with oneDNN on this CPU: on x86,
    bfloat16 needs AVX-512, and float16 its float16 instructions."""
    operators = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return operators._is_mkldnn_bf16_supported()
    return operators._is_mkldnn_fp16_supported()


@functools.cache
def packs_weights() -> bool:
    """Return whether packed_weight works on this CPU, by one trial: products of one row and of many
    are compared with fp32. ARM is excluded, because the gain there has not been measured."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    x, weight = (
        torch.arange(rows * 512).remainder(period).sub(period // 2).view(rows, 512).bfloat16() / 64
        for rows, period in ((200, 113), (576, 127))
    )
    try:
        packed = packed_weight(weight)
        found = torch.cat([linear_by_onednn(rows, packed) for rows in (x[:1], x[1:])])
    except RuntimeError:
        return False
    expected = x.float() @ weight.float().t()
    return bool((found - expected).norm() < 0.01 * expected.norm())


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has hooks from register_hook, which receive each gradient before it
    is accumulated.

    No public function returns this.
    """
    return bool(tensor._backward_hooks)


def allow_recompilations(count: int) -> None:
    """Raise the recompilation limit of torch.compile per function to at least `count`.

    The public setting torch.compiler.config.recompile_limit exists only in newer versions. This
    imports torch._dynamo (0.7 s, 70 MB).
    """
    import torch._dynamo

    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)


def skip_frames(function: Callable) -> None:
    """Let torch.compile call a function between its graphs, and trace only what the function calls.

    torch.compiler.disable(recursive=False) is public, but returns another function.
    """
    from torch._dynamo.decorators import skip

    skip(function)


def profiler_runs() -> bool:
    """Return whether a profiler records this thread.

    The public record_function takes time even without a profiler.
    """
    return torch.autograd._profiler_enabled()


def shares_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are views of the same memory."""
    return storage_key(one.untyped_storage()) == storage_key(other.untyped_storage())


def silu_backward(grad: torch.Tensor, x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Write the gradient of silu with respect to x to `out`, which may be `grad`.

    torch.autograd.grad computes the same, but allocates new memory.
    """
    return torch.ops.aten.silu_backward.grad_input(grad, x.detach(), grad_input=out)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that is unique among existing storages.

    Each call of untyped_storage() creates a new Python object, and the address of the memory is 0
    for every tensor on meta.
    """
    return storage._cdata


def flop_formulas() -> dict:
    """Return torch's formulas for the FLOPs of operators, by overload packet.

    The public FlopCounterMode uses these formulas, but counts only FLOPs.
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
    """Return the kernel that scaled_dot_product_attention would choose on the device of q.

    k and v may have fewer heads than q. Public functions such as
    torch.backends.cuda.can_use_flash_attention check one kernel each, and do not return which
    kernel is preferred.
    """
    causal = mask is None and q.shape[2] == k.shape[2]
    options = {"is_causal": causal, "enable_gqa": k.shape[1] < q.shape[1]}
    return SDPBackend(torch._fused_sdp_choice(q, k, v, mask, dropout, **options))


_PRECISION = threading.Lock()


@contextmanager
def factors_are_bfloat16() -> Iterator[None]:
    """Let oneDNN multiply batches of fp32 matrices whose values bfloat16 represents exactly.

    The sums are fp32. Without it, MKL multiplies such batches. The setting applies to the whole
    process, so one thread at a time uses it.
    """
    matmul: Any = torch.backends.mkldnn.matmul  # pyrefly: ignore[missing-attribute]
    with _PRECISION:
        before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
        try:
            yield
        finally:
            matmul.fp32_precision = before


def softmax_backward(gradient: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the input of softmax over the last dimension.

    weights: the result of softmax. gradient: its gradient, in the same dtype. The sums are fp32.
    Public functions compute it from several tensors of this size.
    """
    return torch.ops.aten._softmax_backward_data(gradient, weights, -1, weights.dtype)


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
    """Return the causal attention of concatenated sequences of different lengths.

    The function is public, but since torch 2.12 it needs enable_gqa if keys have fewer heads than
    queries. Earlier versions support this without the option. This imports torch._dynamo (0.7 s,
    70 MB).

    Args:
        q, k, v: [tokens, heads, head_size].
        boundaries, longest, key_boundaries, longest_of_keys: see megazoo.layers.Packed. If a
            sequence has fewer queries than keys, the queries are its last tokens.
        scale: scale of the scores.
        window: number of tokens that a query attends to, including itself. By default all.
    """
    from torch.nn.attention.varlen import varlen_attn

    before = -1 if window is None else window - 1  # tokens; -1 means all
    options: dict[str, Any] = {"scale": scale, "window_size": (before, 0)}  # 0 tokens after: causal
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = k.shape[1] < q.shape[1]
    if key_boundaries is None or longest_of_keys is None:
        key_boundaries, longest_of_keys = boundaries, longest
    y = varlen_attn(q, k, v, boundaries, key_boundaries, longest, longest_of_keys, **options)
    assert isinstance(y, torch.Tensor)  # without further results
    return y


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    used: torch.Tensor,
    table: torch.Tensor,
    boundaries: torch.Tensor,
    slot_boundaries: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Return the attention of one query per row to the first keys of its page: [rows, heads,
    head_size].

    The public function varlen_attn calls the same kernel, but also launches one that makes zeros.
    Only newer versions of torch support pages: see takes_pages.

    Args:
        q: [rows, heads, head_size].
        k, v: [pages, slots of a page, heads, head_size]. k and v may have fewer heads than q. The
            number of slots is a multiple of 256.
        used, table, boundaries, slot_boundaries: see megazoo.layers.masks.Paged.
        scale: scale of the scores.
    """
    y, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        boundaries,
        slot_boundaries,
        1,
        k.shape[1],
        0.0,
        False,
        False,
        scale=scale,
        window_size_left=-1,
        window_size_right=-1,
        seqused_k=used,
        block_table=table,
    )
    return y


@functools.cache
def takes_pages(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether paged_attention works for this dtype, by one trial: two rows with 300 keys and
    one key, compared with matrix products. The host waits for the result."""
    rows, slots, heads, size = 2, 512, 2, 64
    number = torch.arange(2 * rows * slots * heads * size, device=device)
    values = number.remainder(9973).mul(0.7).sin().to(dtype)
    k, v = values.view(2, rows, heads, slots, size).transpose(2, 3)  # as in a cache
    q = values[-rows * 2 * heads * size :].view(rows, 2 * heads, size) * 2
    places, first = torch.arange(slots, device=device), torch.arange(rows + 1, device=device).int()
    used = (300 - 299 * first[:rows]).int()
    empty = places >= used[:, None]  # [rows, slots]
    v.masked_fill_(empty[:, :, None, None], 64.0)
    try:
        table = first[:rows, None]
        y = paged_attention(q, k, v, used, table, first, first * slots, None)
    except (RuntimeError, TypeError):  # TypeError: older versions of torch
        return False
    k, v = (x.float().repeat_interleave(2, dim=2).transpose(1, 2) for x in (k, v))
    scores = k @ q.float()[..., None] * size**-0.5  # [rows, heads, slots, 1]
    weights = scores.masked_fill(empty[:, None, :, None], -torch.inf).softmax(2)
    expected = (weights * v).sum(2)
    return bool((y.float() - expected).abs().amax() < 0.05)


def end_openmp_threads() -> None:
    """End the threads of OpenMP: forked processes don't have them, but would wait for them.

    They start again when they are needed. torch has no function for this, so that this one is
    called in the OpenMP library of torch, if it is of version 5.0.
    """
    library = ctypes.CDLL(torch._C.__file__)
    if hasattr(library, "omp_pause_resource_all"):
        hard = 2
        library.omp_pause_resource_all(hard)


def stored_in_file(file: str, offset: int, length: int) -> Any:
    """Return what the metadata of torch.distributed.checkpoint has for a chunk in a file.

    The reader of torch needs an object of this class, which only its writer makes.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def flash_attention_operators() -> tuple[Callable, Callable]:
    """Return the operators of flash attention, which stores no scores, and of its backward.

    On the device meta, the public scaled_dot_product_attention chooses another operator.
    """
    aten = torch.ops.aten
    return (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )


def results_are_new(operator: torch._ops.OpOverload) -> list[bool]:
    """Return, for each result of an operator in __torch_dispatch__, whether it is new memory.

    Otherwise the result is an argument or a view of one. Only the operator's schema contains this.
    """
    return [returned.alias_info is None for returned in operator._schema.returns]


def writes_memory(operator: torch._ops.OpOverload) -> bool:
    """Return whether an operator in __torch_dispatch__ runs a kernel. Otherwise it returns views or
    uninitialized memory."""
    name = operator.overloadpacket.__name__
    if name == "_unsafe_view" or name.startswith(("empty", "new_empty")):
        return False
    aliases = [returned.alias_info for returned in operator._schema.returns]
    return any(alias is None or alias.is_write for alias in aliases)


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dicts, including repetitions."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
