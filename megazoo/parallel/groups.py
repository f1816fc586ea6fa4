"""The process groups of a context: one for each row of the mesh, connected before they are used."""

import resource
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

# CPU tensors, such as the shape of a batch, travel by gloo, whatever the device.
CUDA_BACKENDS = "cpu:gloo,cuda:nccl"
# Files that a rank opens beside its sockets: data, checkpoints, pipes, libraries.
OTHER_FILES = 512


class VirtualGroup(dist.ProcessGroup):
    """A stand-in for a process group of which only this rank is there.

    On the meta device, where there are shapes and no values, collectives over it do nothing but add
    up: `calls`, their number; `sent`, the bytes that a rank sends (see collectives.py); and
    `sent_beside`, those of them that are on their way while it goes on with something else.
    """

    def __init__(self, size: int, rank: int):
        # torch's stub has only the constructor with a store
        super().__init__(rank, size)  # pyrefly: ignore[missing-argument, bad-argument-type]
        self.calls, self.sent, self.sent_beside = 0, 0.0, 0.0


def groups_of(
    ranks: torch.Tensor, device: torch.device, timeout: timedelta
) -> list[dist.ProcessGroup]:
    """Make the groups along each dimension of the mesh, and return this rank's, one a dimension.

    ranks: of the world, as they lie in the mesh. Every rank calls this, and makes every group, in
    the same order. On CUDA they are of gloo, too, even if the world, which a user may have
    initialised, is of NCCL alone.

    Where a dimension has one rank, a group of this rank alone stands for it, the same for all such
    dimensions. It is no None: to torch.distributed that means the whole world, over which
    `dist.all_reduce(x, group=ctx.tp_group)` in a user's own code would then sum. It is a group of
    gloo, whatever the device: a communicator of NCCL takes memory of the GPU, and all ranks would
    have to make one for each rank of the world, one after the other.
    """
    alone = [solitary_group(timeout)] if 1 in ranks.shape else []
    return [
        alone[0] if size == 1 else group_along(dim, ranks, device, timeout)
        for dim, size in enumerate(ranks.shape)
    ]


def solitary_group(timeout: timedelta) -> dist.ProcessGroup:
    """Make a group of this rank alone, of which the others need not know."""
    mine = [dist.get_rank()]
    group = dist.new_group(mine, timeout, backend="gloo", use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # of which this rank is
    return group


def group_along(
    dim: int, ranks: torch.Tensor, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """Make the groups along one dimension of the mesh, and return this rank's."""
    rows = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    backend = CUDA_BACKENDS if device.type == "cuda" else None  # None: the world's
    # new_group does not inherit the world's timeout
    groups = [dist.new_group(row, timeout=timeout, backend=backend) for row in rows]
    # of those of other ranks new_group returns a number
    return next(group for group in groups if isinstance(group, dist.ProcessGroup))


def warm_up(
    groups: Iterable[dist.ProcessGroup], pipeline: dist.ProcessGroup, device: torch.device
) -> None:
    """Connect the ranks of each group, and neighbours of the pipeline, by a number that they send.

    NCCL connects two ranks when something is first sent between them. That takes time and memory,
    and all ranks of a group have to take part, which in the middle of a schedule they don't. All
    ranks call this with the same groups in the same order. pipeline: one of them.
    """
    number = torch.zeros(1, device=device)
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(number, group=group)
            _finish(device)  # communicators of NCCL that run at once may wait for each other
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
    """Wait until the device has done what it was given; of the CPU, that is so already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allow_sockets(world: int) -> None:
    """Let this process open as many files as gloo needs in a world of so many ranks.

    gloo connects each rank of a group with each other one: the world, the axes, two axes together,
    and a group for saving in the background have up to five sockets for each other rank together,
    where many systems allow 1,024 files. They allow a process to raise that itself, up to a limit
    that is higher. gloo could connect ranks when they first need it, too (TORCH_GLOO_LAZY_INIT);
    but then, in torch up to 2.13, a rank waits without a timeout for one that has died before.
    """
    needed, unlimited = 5 * world + OTHER_FILES, resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == unlimited else min(needed, hard)
    if soft != unlimited and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
