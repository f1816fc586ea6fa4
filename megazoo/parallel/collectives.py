"""Plain collectives, without autograd. On a virtual group they do nothing but count their bytes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange

from megazoo.errors import UserError
from megazoo.parallel.axes import Axis
from megazoo.parallel.context import NO_RANKS, ParallelContext
from megazoo.parallel.cpu import shared_memory
from megazoo.parallel.groups import VirtualGroup
from megazoo.parallel.timing import spent
from megazoo.torch_internals import renamed_collective

_all_gather = renamed_collective("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = renamed_collective("reduce_scatter_single", "reduce_scatter_tensor")


def all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    op: dist.ReduceOp = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce `tensor` in place over `group`; nothing to do in a group of one. Returns the work if
    async_op."""
    if group is None or group.size() == 1:
        return None
    if not async_op and (reducer := _reducer_for(tensor, group)):
        with spent("communication", "all_reduce"):
            return reducer.all_reduce(tensor, tensor, op)
    return _run(dist.all_reduce, tensor, group=group, whole=tensor, op=op, async_op=async_op)


def all_reduce_over(
    tensor: torch.Tensor, axes: Iterable[Axis], op: dist.ReduceOp = dist.ReduceOp.SUM
) -> None:
    """Reduce `tensor` in place over several axes of the mesh.

    It goes over one axis after the other, in the order given, on which the rounding depends.
    """
    for axis in axes:
        all_reduce(tensor, axis.group, op)


def summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a new tensor, the sum of every rank's."""
    tensor = tensor.contiguous()
    if reducer := _reducer_for(tensor, group):
        total = torch.empty_like(tensor)
        with spent("communication", "all_reduce"):
            reducer.all_reduce(tensor, total)
    else:
        total = tensor.clone()
        all_reduce(total, group)
    return total


def reduce_scatter_shards(
    flat: torch.Tensor, group: dist.ProcessGroup | None, async_op: bool = False
) -> dist.Work | None:
    """Sum `flat` [n] over `group`, each rank its own part of n / size only, in place. Returns the
    work if async_op."""
    if group is None or group.size() == 1:
        return None
    return _run(
        _reduce_scatter, _own_shard(flat, group), flat, group=group, whole=flat, async_op=async_op
    )


def all_gather_shards(
    flat: torch.Tensor, group: dist.ProcessGroup | None, async_op: bool = False
) -> dist.Work | None:
    """Give all ranks of `group` each one's part of `flat` [n], n / size long, in place. Returns the
    work if async_op."""
    if group is None or group.size() == 1:
        return None
    return _run(
        _all_gather, flat, _own_shard(flat, group), group=group, whole=flat, async_op=async_op
    )


def gather_ranges(
    flat: torch.Tensor, ranges: list[tuple[int, int]], target: int, group: dist.ProcessGroup
) -> None:
    """Give rank `target` of `group` the elements ranges[rank] of each rank's `flat` [n], in place.

    All ranks of the group call it.
    """
    sources = [rank for rank, (first, last) in enumerate(ranges) if rank != target and first < last]
    if group.rank() == target:
        ops = [(dist.irecv, rank) for rank in sources]
    else:
        ops = [(dist.isend, target)] if group.rank() in sources else []
    peers = [
        dist.P2POp(
            op,
            flat[slice(*ranges[peer if op is dist.irecv else group.rank()])],
            group=group,
            group_peer=peer,
        )
        for op, peer in ops
    ]
    for work in dist.batch_isend_irecv(peers) if peers else ():
        work.wait()


def all_gather_last_dim(
    tensor: torch.Tensor, group: dist.ProcessGroup, sizes: list[int]
) -> torch.Tensor:
    """Concatenate every rank's `tensor` along the last dimension, of which rank r has sizes[r]."""
    # ranks must send equal shapes
    padded = F.pad(tensor, (0, max(sizes) - tensor.shape[-1])).contiguous()
    parts = _gather(padded, group)
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)


def all_gather_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate every rank's part of the sequence, dimension -2: [..., part, size] -> [...,
    sequence, size]."""
    return _in_sequence(all_gather_parts(tensor, group))


def reduce_scatter_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum `tensor`; each rank gets its part of the sequence, dimension -2: [..., sequence, size] ->
    [..., part, size]."""
    return reduce_scatter_parts(_parts_of_sequence(tensor, group), group)


def all_gather_parts(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return every rank's tensor: [...] -> [ranks, ...]."""
    return _gather(tensor.contiguous(), group)


def reduce_scatter_parts(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum contiguous `parts`, one for each rank, which gets its own: [ranks, ..., size] -> [...,
    size]."""
    mine = torch.empty_like(parts[0])
    if reducer := _reducer_for(parts, group):
        with spent("communication", "reduce_scatter"):
            reducer.reduce_scatter(parts, mine)
    else:
        _run(_reduce_scatter, mine.flatten(0, -2), parts.flatten(0, -2), group=group, whole=parts)
    return mine


def exchange_parts(
    tensor: torch.Tensor, group: dist.ProcessGroup, sends: Sequence[int], receives: Sequence[int]
) -> torch.Tensor:
    """Send sends[r] rows of `tensor`, one rank's after the other, to each rank r, and return what
    they send: [sends' sum, ...] -> [receives' sum, ...]. Rank r sends receives[r] rows."""
    received = tensor.new_empty(sum(receives), *tensor.shape[1:])
    leaving = tensor.shape[0] - sends[group.rank()]
    _run(
        dist.all_to_all_single,
        received,
        tensor.contiguous(),
        list(receives),
        list(sends),
        group=group,
        whole=tensor,
        sent=leaving * tensor.shape[1:].numel(),
    )
    return received


# Asynchronous versions: each returns a function that waits for the result and returns it. On CUDA
# the sum overlaps with kernels that are launched before that function is called. This is certain
# only if the device runs kernels in launch order, with CUDA_DEVICE_MAX_CONNECTIONS=1 in the
# environment (as for Megatron-LM); otherwise a large product may delay it.


def begin_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Begin to sum every rank's `tensor`, in place."""
    return _result(all_reduce(tensor, group, async_op=True), lambda: tensor)


def begin_all_gather_sequence(
    tensor: torch.Tensor, group: dist.ProcessGroup
) -> Callable[[], torch.Tensor]:
    """Begin all_gather_sequence(tensor, group)."""
    tensor = tensor.contiguous()
    parts = tensor.new_empty(group.size(), *tensor.shape)
    work = _run(
        _all_gather, parts.view(-1), tensor.view(-1), group=group, whole=parts, async_op=True
    )
    return _result(work, lambda: _in_sequence(parts))


def begin_reduce_scatter_sequence(
    tensor: torch.Tensor, group: dist.ProcessGroup
) -> Callable[[], torch.Tensor]:
    """Begin reduce_scatter_sequence(tensor, group)."""
    parts = _parts_of_sequence(tensor, group)
    mine = torch.empty_like(parts[0])
    work = _run(
        _reduce_scatter,
        mine.flatten(0, -2),
        parts.flatten(0, -2),
        group=group,
        whole=parts,
        async_op=True,
    )
    return _result(work, lambda: mine)


def broadcast_from_stage(tensor: torch.Tensor, pp_rank: int, ctx: ParallelContext) -> torch.Tensor:
    """Give every pipeline rank the tensor of pipeline rank `pp_rank`, in place."""
    if ctx.pp_size > 1:
        with spent("communication", "broadcast"):
            dist.broadcast(tensor, src=ctx.rank_at(pp=pp_rank), group=ctx.pp_group)
    return tensor


def all_gather_objects(
    value: Any, ctx: ParallelContext, group: dist.ProcessGroup | None = None
) -> list:
    """Return every rank's small Python value, in the order of the world's ranks.

    group: a group of all ranks; by default the world's.
    """
    values = [value] * ctx.world_size
    if ctx.world_size > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def _run(
    collective: Callable,
    *tensors: torch.Tensor | list,
    group: dist.ProcessGroup,
    whole: torch.Tensor,
    sent: float | None = None,
    **options: Any,
) -> dist.Work | None:
    """Call a collective of torch.distributed: collective(*tensors, group=group, **options).

    whole: what the ranks have in the end, together, or have had at the start. On a VirtualGroup the
    bytes of it that a rank sends are counted instead: `sent` elements; by default each rank's part
    goes round a ring, in an all-reduce twice (NCCL's algorithm).
    """
    if not isinstance(group, VirtualGroup):
        with spent("communication", collective.__name__):
            return collective(*tensors, group=group, **options)
    if not whole.is_meta:
        raise UserError(NO_RANKS)
    if sent is None:
        rounds = 2 if collective is dist.all_reduce else 1
        sent = rounds * (group.size() - 1) / group.size() * whole.numel()
    group.calls += 1
    group.sent += sent * whole.element_size()
    if options.get("async_op"):
        group.sent_beside += sent * whole.element_size()
    return None


def _reducer_for(tensor: torch.Tensor, group: dist.ProcessGroup) -> shared_memory.Reducer | None:
    """Return what moves this tensor between CPU ranks of one host; None where torch.distributed has
    to. All ranks of a group have a tensor of the same dtype and device, so that they agree."""
    if isinstance(group, VirtualGroup) or group.size() == 1:
        return None
    if tensor.device.type != "cpu" or tensor.dtype not in shared_memory.DTYPES:
        return None
    return shared_memory.shared_by(group, shared_memory.Reducer)


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return every rank's contiguous tensor, [ranks, *shape]."""
    parts = tensor.new_empty(group.size(), *tensor.shape)
    if reducer := _reducer_for(tensor, group):
        with spent("communication", "all_gather"):
            reducer.all_gather(tensor, parts)
    else:
        _run(_all_gather, parts.view(-1), tensor.view(-1), group=group, whole=parts)
    return parts


def _in_sequence(parts: torch.Tensor) -> torch.Tensor:
    """Put the ranks' parts one after the other: [ranks, ..., part, size] -> [..., sequence,
    size]."""
    return rearrange(parts, "ranks ... part size -> ... (ranks part) size")


def _parts_of_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Part the sequence: [..., sequence, size] -> [ranks, ..., part, size], contiguous."""
    parts = rearrange(tensor, "... (ranks part) size -> ranks ... part size", ranks=group.size())
    return parts.contiguous()


def _result(
    work: dist.Work | None, result: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """Return a function that waits for the work, if there is any, and returns result()."""

    def finish() -> torch.Tensor:
        if work:
            with spent("communication", "wait"):
                work.wait()
        return result()

    return finish


def _own_shard(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of `flat` [n], n / size long."""
    return flat.view(group.size(), -1)[group.rank()]
