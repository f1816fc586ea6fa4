"""Plain collectives, without autograd. On a virtual group they only count their bytes."""

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
    """Reduce `tensor` in place over `group`. In a group of one it does nothing. Returns the Work if
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

    It reduces over one axis after the other. The rounding depends on the given order.
    """
    for axis in axes:
        all_reduce(tensor, axis.group, op)


def summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a new tensor: the sum over all ranks."""
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
    """Reduce-scatter `flat` [n] over `group` in place: each rank gets the sum of its part of n /
    size elements. Returns the Work if async_op."""
    if group is None or group.size() == 1:
        return None
    return _run(
        _reduce_scatter, _own_shard(flat, group), flat, group=group, whole=flat, async_op=async_op
    )


def all_gather_shards(
    flat: torch.Tensor, group: dist.ProcessGroup | None, async_op: bool = False
) -> dist.Work | None:
    """All-gather `flat` [n] over `group` in place: each rank contributes its part of n / size
    elements. Returns the Work if async_op."""
    if group is None or group.size() == 1:
        return None
    return _run(
        _all_gather, flat, _own_shard(flat, group), group=group, whole=flat, async_op=async_op
    )


def gather_ranges(
    flat: torch.Tensor, ranges: list[tuple[int, int]], target: int, group: dist.ProcessGroup
) -> None:
    """Gather the elements ranges[rank] of each rank's `flat` [n] on rank `target` of `group`, in
    place.

    All ranks of the group must call it.
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
    """Concatenate every rank's `tensor` along the last dimension. Rank r has sizes[r] elements of
    it."""
    # ranks must send equal shapes
    padded = F.pad(tensor, (0, max(sizes) - tensor.shape[-1])).contiguous()
    parts = _gather(padded, group)
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)


def all_gather_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate every rank's part of the sequence, dimension -2: [..., part, size] -> [...,
    sequence, size]."""
    return _in_sequence(all_gather_parts(tensor, group))


def reduce_scatter_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Reduce-scatter `tensor` along the sequence, dimension -2: [..., sequence, size] -> [...,
    part, size]."""
    return reduce_scatter_parts(_parts_of_sequence(tensor, group), group)


def all_gather_parts(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return every rank's tensor: [...] -> [ranks, ...]."""
    return _gather(tensor.contiguous(), group)


def reduce_scatter_parts(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Reduce-scatter contiguous `parts`, one per rank: [ranks, ..., size] -> [..., size]."""
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
    """Send sends[r] rows of `tensor` to each rank r, in rank order, and return the received rows
    (all-to-all): [sum of sends, ...] -> [sum of receives, ...]. Rank r sends receives[r] rows."""
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
    """Begin to all-reduce `tensor` in place."""
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
    """Broadcast the tensor of pipeline rank `pp_rank` to every pipeline rank, in place."""
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

    whole: the data of all ranks together, at the end or at the start. On a VirtualGroup no data is
    sent; the bytes that a rank would send are counted: `sent` elements of `whole`. By default each
    rank's part goes around a ring, twice in an all-reduce (NCCL's algorithm).
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
    """Return the Reducer for this tensor between CPU ranks of one host, or None if
    torch.distributed must be used. All ranks get the same answer, because their tensors have the
    same dtype and device."""
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
    """Split the sequence: [..., sequence, size] -> [ranks, ..., part, size], contiguous."""
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
