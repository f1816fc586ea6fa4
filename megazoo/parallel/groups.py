"""The process groups of a context: one for each row of the mesh, connected before they are used."""

import resource
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

# CPU tensors, such as the shape of a batch, use gloo on every device.
CUDA_BACKENDS = "cpu:gloo,cuda:nccl"
# Files of a rank in addition to its sockets: data, checkpoints, pipes, libraries.
OTHER_FILES = 512


class VirtualGroup(dist.ProcessGroup):
    """A stand-in for a process group with only this rank.

    On the meta device, which has shapes and no values, collectives over it only count: `calls`,
    their number; `sent`, the bytes that a rank sends (see collectives.py); and `sent_beside`, those
    of them that are sent while the rank continues.
    """

    def __init__(self, size: int, rank: int):
        # torch's stub has only the constructor with a store
        super().__init__(rank, size)  # pyrefly: ignore[missing-argument, bad-argument-type]
        self.calls, self.sent, self.sent_beside = 0, 0.0, 0.0


def groups_of(
    ranks: torch.Tensor, device: torch.device, timeout: timedelta
) -> list[dist.ProcessGroup]:
    """Create the groups along each dimension of the mesh, and return this rank's, one per
    dimension.

    ranks: world ranks, in the shape of the mesh. Every rank calls this, and creates every group, in
    the same order. On CUDA the groups also have gloo, even if the world, which a user may have
    initialised, has only NCCL.

    A dimension with one rank gets a group with only this rank, the same for all such dimensions. It
    must not be None: for torch.distributed, None is the whole world, and `dist.all_reduce(x,
    group=ctx.tp_group)` in custom code would sum over it. The group uses gloo on every device: an
    NCCL communicator needs GPU memory, and all ranks would have to create one per world rank in
    sequence.
    """
    alone = [solitary_group(timeout)] if 1 in ranks.shape else []
    return [
        alone[0] if size == 1 else group_along(dim, ranks, device, timeout)
        for dim, size in enumerate(ranks.shape)
    ]


def solitary_group(timeout: timedelta) -> dist.ProcessGroup:
    """Create a group with only this rank; other ranks do not take part."""
    mine = [dist.get_rank()]
    group = dist.new_group(mine, timeout, backend="gloo", use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # this rank is in it
    return group


def group_along(
    dim: int, ranks: torch.Tensor, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """Create the groups along one dimension of the mesh, and return this rank's."""
    rows = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    backend = CUDA_BACKENDS if device.type == "cuda" else None  # None: that of the world
    # new_group does not inherit the world's timeout
    groups = [dist.new_group(row, timeout=timeout, backend=backend) for row in rows]
    # for groups of other ranks, new_group returns a number
    return next(group for group in groups if isinstance(group, dist.ProcessGroup))


def warm_up(
    groups: Iterable[dist.ProcessGroup], pipeline: dist.ProcessGroup, device: torch.device
) -> None:
    """Connect the ranks of each group, and neighbours in the pipeline, by sending a number.

    NCCL connects two ranks at their first communication. That takes time and memory, and needs all
    ranks of a group, which may not take part in the middle of a schedule. All ranks call this with
    the same groups in the same order. pipeline: one of them.
    """
    number = torch.zeros(1, device=device)
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(number, group=group)
            _finish(device)  # NCCL communicators that run concurrently may deadlock
    size, rank = pipeline.size(), pipeline.rank()
    if size == 1:
        return
    ops = [
        dist.P2POp(op, number.clone(), group=pipeline, group_peer=(rank + step) % size)
        for step in (1, -1)
        for op in (dist.isend, dist.irecv)
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    _finish(device)


def _finish(device: torch.device) -> None:
    """Wait until the device has finished its work; on a CPU, return immediately."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allow_sockets(world: int) -> None:
    """Raise this process's limit of open files to what gloo needs in a world of this size.

    gloo connects each rank of a group with every other one. The world, the axes, two joined axes,
    and a group for saving in the background have up to five sockets per other rank together, and
    many systems allow 1,024 files. A process may raise its limit up to the hard limit. gloo could
    also connect ranks on demand (TORCH_GLOO_LAZY_INIT); but then, in torch up to 2.13, a rank waits
    without a timeout for one that has died before.
    """
    needed, unlimited = 5 * world + OTHER_FILES, resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == unlimited else min(needed, hard)
    if soft != unlimited and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
