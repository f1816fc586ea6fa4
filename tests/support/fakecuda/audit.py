"""Watches every operator that runs: counts kernels and bytes by line of megazoo's source, and names
what would make the host wait for the device."""

import contextlib
import sys
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

ROOT = str(Path(__file__).parents[3] / "megazoo") + "/"
CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
# They launch nothing.
FREE = {
    aten.empty,
    aten.empty_like,
    aten.new_empty,
    aten.empty_strided,
    aten.new_empty_strided,
    aten.detach,
    aten.alias,
    aten.lift_fresh,
    aten._unsafe_view,
    aten.set_,
    torch.ops.prim.device,
}
# They don't read what they overwrite.
WRITING = {aten.copy_, aten.fill_, aten.zero_}
# They touch a few elements of their first tensor: as many as there are indices or results.
INDEXED = {aten.gather, aten.embedding, aten.index_select, aten.scatter_add_}
VARLEN, PAGES = "torch_attn._varlen_attn", "_flash_attention_forward"
ATTENTION = {"_scaled_dot_product_flash_attention", VARLEN, PAGES}  # get keys and values
# Products that may have fp32 results of 16-bit factors: what they write of it, and read of the
# matrix that they add to, is counted as what another kernel would move.
SUMS = {aten.mm, aten.addmm}
# Functions that go on only if what they ask of a tensor is true: `choose`, if all logits are
# finite, `_check`, if no prompt ends with padding, and `takes_pages`, if its trial succeeds.
TRUE_IN = {"choose", "_check", "takes_pages"}


@dataclass
class Audit:
    """What was seen. Each Counter's keys say what, and at which line of megazoo.

    syncs: where the host waits for the device. faults: what CUDA or NCCL would refuse.
    collectives: by kind and axis of the mesh. attention: the kernels that torch would choose.
    bytes, launches, flops: elementwise bytes that kernels move, kernels, and FLOPs of products;
    bytes_of, launches_of: the same by line. captured: the kernels of each CUDA graph.
    misaligned: products whose 16-bit operands are. product_bytes: of the factors and results of
    matrix products. attention_bytes: of the keys and values that attention is given: of a page all
    slots, though its kernel reads only those in use.
    captured_bytes: the bytes of each CUDA graph, by kind.
    """

    syncs: Counter = field(default_factory=Counter)
    faults: Counter = field(default_factory=Counter)
    collectives: Counter = field(default_factory=Counter)
    attention: Counter = field(default_factory=Counter)
    misaligned: Counter = field(default_factory=Counter)
    bytes_of: Counter = field(default_factory=Counter)
    launches_of: Counter = field(default_factory=Counter)
    captured: list[int] = field(default_factory=list)
    captured_bytes: list[Counter] = field(default_factory=list)
    flops: int = 0
    product_bytes: int = 0
    attention_bytes: int = 0

    @property
    def bytes(self) -> int:
        return sum(self.bytes_of.values())

    @property
    def launches(self) -> int:
        return sum(self.launches_of.values())

    def all_bytes(self) -> Counter:
        """Return the bytes per kind: elementwise kernels, products and attention."""
        names = ("bytes", "product_bytes", "attention_bytes")
        return Counter({name: getattr(self, name) for name in names})

    def sync(self, what: str) -> None:
        self.syncs[f"{what} at {line()}"] += 1

    def fault(self, what: str) -> None:
        self.faults[f"{what} at {line()}"] += 1

    def clear(self) -> None:
        """Forget all, in place."""
        for name in vars(self):
            setattr(self, name, type(getattr(self, name))())


audit = Audit()
longer_arguments = False  # see `launches`
# What the first stage tells the others of the shape of a batch, number by number.
told: deque[int] = deque()
# The storages of page-locked memory, by their numbers. A weak reference keeps the number from being
# given to another.
pinned: dict[int, StorageWeakRef] = {}


def pin(tensor: torch.Tensor) -> None:
    """Count a tensor's memory as page-locked."""
    reference = StorageWeakRef(tensor.untyped_storage())
    pinned[reference.cdata] = reference


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage()._cdata in pinned


def line() -> str:
    """Return the innermost line of megazoo's that runs: layers/norm.py:80."""
    frame = sys._getframe(1)
    while frame:
        name = frame.f_code.co_filename
        if name.startswith(ROOT):
            return f"{name[len(ROOT) :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def is_inside(functions: set[str]) -> bool:
    """Say whether a function of megazoo's with one of these names runs."""
    frame = sys._getframe(1)
    while frame:
        code = frame.f_code
        if code.co_filename.startswith(ROOT) and code.co_name in functions:
            return True
        frame = frame.f_back
    return False


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def launches(name: str, args) -> int:
    """Count the kernels of an operator: one, or for an operator on lists of tensors as many as
    their chunks and addresses fill.

    Source: aten/src/ATen/native/cuda/MultiTensorApply.cuh: a launch takes so many chunks of 65,536
    elements, and so many tensors, by how many lists there are: 320 and 110 to 30; in torch built
    for CUDA 13, whose kernels take longer arguments, 7 times as many (`longer_arguments`). And
    Shape.cu: tensors are joined 128 at a time. And torch/nn/attention/varlen.py: it also makes a
    tensor of zeros. (Kernels that add parts of attention, where keys are split, are not counted.)
    """
    if name == VARLEN:
        return 2
    if name in ("cat", "stack"):
        return -(-len(args[0]) // 128)
    lists = [list(each) for each in args if isinstance(each, list | tuple) and each]
    lists = [each for each in lists if isinstance(each[0], torch.Tensor) and each[0].dim()]
    if not name.startswith(("_foreach_", "_fused_")) or not lists:
        return 1
    more = 7 if longer_arguments else 1
    at_once = (110, 64, 48, 36, 30)[min(len(lists), 5) - 1] * more
    chunks = sum(-(-tensor.numel() // 65_536) for tensor in lists[0])
    return max(-(-len(lists[0]) // at_once), -(-chunks // (320 * more)))


class Watcher(TorchDispatchMode):
    """Stands above the FakeTensorMode, and gives a value where a device would have given one."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, packet = kwargs or {}, function._overloadpacket
        if packet is aten._local_scalar_dense:
            return self._read(function, args)
        if packet is aten.nonzero and args[0].device.type == "cuda":
            audit.sync("nonzero")
            return args[0].new_empty(0, args[0].dim(), dtype=torch.int64)
        if packet is aten.index and any(t is not None and t.dtype == torch.bool for t in args[1]):
            audit.sync("an index by a mask")
            return args[0].new_empty(args[0].numel() // 2)
        if packet in (aten.index, aten.index_put, aten.index_put_):
            self._watch_indices(args)
        if packet is aten._foreach_copy_:
            pairs = zip(*args[:2], strict=True)
            if any(target.device != source.device for target, source in pairs):
                audit.sync("copies of a list between devices")
        if str(packet) == VARLEN:
            q, k = args[:2]
            what = f"q {list(q.shape)} k {list(k.shape)} {str(q.dtype)[6:]}"
            audit.attention[f"sm90 varlen, sm80 varlen: {what} boundaries {len(args[3])}"] += 1
        if packet is aten._flash_attention_forward:
            q, k = args[:2]
            what = f"q {list(q.shape)} k {list(k.shape)} {str(q.dtype)[6:]}"
            audit.attention[f"sm90 pages, sm80 pages: {what}"] += 1
        if packet in (aten._to_copy, aten.copy_):
            self._watch_copy(packet, args, kwargs)
        result = function(*args, **kwargs)
        self._count(function, args, kwargs, result)
        return result

    def _read(self, function, args):
        """A number is read: the host waits for it if it is on the device. None is known but those
        that the program itself has written; a truth is as it has to be for the program to go on."""
        (tensor,) = args
        if tensor.device.type == "cuda":
            audit.sync("a number is read")
        if told and is_inside({"_agree_on_shape"}):
            return told.popleft()
        if tensor.device.type != "cuda":
            with contextlib.suppress(DataDependentOutputException):
                return function(*args)
        if tensor.dtype == torch.bool:
            return is_inside(TRUE_IN)
        return 0.0 if tensor.is_floating_point() else 0

    def _watch_indices(self, args) -> None:
        """Indices of the CPU are copied to the device. To write by a mask, its places are counted
        on the device, but where there is one number for all."""
        if args[0].device.type != "cuda":
            return
        indices = [index for index in args[1] if index is not None]
        if any(index.device.type == "cpu" and index.dim() for index in indices):
            audit.sync("pageable copy of indices to the cuda")
        elif any(index.dtype == torch.bool for index in indices) and args[2].numel() > 1:
            audit.sync("a write by a mask")

    def _watch_copy(self, packet, args, kwargs) -> None:
        """A copy between host and device waits, unless it is told not to and the host's memory is
        page-locked."""
        source = args[0] if packet is aten._to_copy else args[1]
        target = kwargs.get("device") if packet is aten._to_copy else args[0].device
        target = torch.device(target or source.device).type
        if source.device.type == target:
            return
        host = source if target == "cuda" else args[0]
        locked = packet is aten.copy_ or target == "cuda"
        locked = locked and is_pinned(host)
        asynchronous = kwargs.get("non_blocking") or (packet is aten.copy_ and args[2:] == (True,))
        if not (asynchronous and locked):
            audit.sync(f"{'' if locked else 'pageable '}copy to the {target}")

    def _count(self, function, args, kwargs, result) -> None:
        written = {argument.name for argument in function._schema.arguments if argument.is_out}
        read = [value for name, value in kwargs.items() if name not in written]
        ins = [*tensors_in(args), *tensors_in(read)]
        outs, returns = list(tensors_in(result)), function._schema.returns
        packet = function._overloadpacket
        views = returns and all(r.alias_info and not r.alias_info.is_write for r in returns)
        if views or packet in FREE or all(t.device.type != "cuda" for t in ins + outs):
            return
        if outs and not any(t.numel() for t in outs):  # nothing to write
            return
        where, name = line(), str(packet).removeprefix("aten.")
        audit.launches_of[where] += launches(name, args)
        is_attention = name in ATTENTION
        if is_attention:
            audit.attention_bytes += args[1].nbytes + args[2].nbytes
        if name == PAGES:
            rows, heads, size = args[0].shape  # the formulas don't know of pages
            audit.flops += 4 * rows * heads * size * args[1].shape[1]
            return
        if packet in flop_registry:
            if not is_attention:
                audit.product_bytes += sum(t.nbytes for t in ins + outs)
            wide = packet in SUMS and "dtype" in function._overloadname
            given = ins if wide else args  # the formulas don't know of a result's own dtype
            audit.flops += flop_registry[packet](*given, **({} if wide else kwargs), out_val=result)
            if wide:
                audit.bytes_of[where] += sum(
                    t.nbytes for t in ins + outs if t.dtype != ins[-1].dtype
                )
            for t in ins + outs:
                if t.dim() == 2 and t.element_size() == 2 and t.numel() and max(t.stride()) % 8:
                    audit.misaligned[f"{packet.__name__} {list(t.shape)} at {where}"] += 1
            return
        new = [t for t, r in zip(outs, returns, strict=False) if r.alias_info is None]
        out = (new or outs[:1]) * (2 if packet in INDEXED else 1)
        moved = ins[packet in WRITING or packet in INDEXED :] + out
        if packet is aten.index_copy_:
            moved = [args[3], args[3]]
        if packet is aten.scatter_add_:
            moved = [*ins[1:], ins[2], ins[2]]
        audit.bytes_of[where] += sum(
            t.numel() * t.element_size() for t in moved if t.device.type == "cuda"
        )


class Pinning(TorchFunctionMode):
    """Remembers what is to be page-locked, which a torch without CUDA can't do."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        wanted = kwargs.pop("pin_memory", False)
        if function is torch.Tensor.pin_memory:
            result, wanted = args[0].clone(), True
        elif function is torch.Tensor.is_pinned:
            return is_pinned(args[0])
        else:
            result = function(*args, **kwargs)
        if wanted:
            pin(result)
        return result
