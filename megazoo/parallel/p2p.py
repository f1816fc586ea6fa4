"""Point-to-point communication between the stages of the pipeline.

Every transfer is a separate batch over the pipeline group. NCCL runs the batches of a group one
after the other, in the order in which a rank starts them, and a send may block until its receive.
So all ranks start theirs in one order, which a schedule's program defines for training. Without a
batch, NCCL would open a communicator per pair of ranks, and two ranks that each queue a send before
the matching receive would hang.
"""

import torch
import torch.distributed as dist

from megazoo.parallel.context import ParallelContext
from megazoo.parallel.cpu import shared_memory
from megazoo.parallel.timing import spent


def start_receive(
    buffer: torch.Tensor, pp_rank: int, ctx: ParallelContext
) -> shared_memory.Message | dist.Work:
    """Start receiving into a contiguous tensor from a pipeline rank, which knows its shape and
    dtype; returns what to wait for, by its `wait()`, before it is read."""
    boxes = _mailboxes(buffer, ctx)
    return boxes.receive(buffer, pp_rank) if boxes else _start(dist.irecv, buffer, pp_rank, ctx)


def start_send(tensor: torch.Tensor, pp_rank: int, ctx: ParallelContext) -> dist.Work | None:
    """Start sending a contiguous tensor to a pipeline rank.

    Returns the work to wait for before the tensor may change; until then it must live. Between CPU
    ranks of one host a small tensor is sent when this returns None; it waits where too many have
    not been read.
    """
    boxes = _mailboxes(tensor, ctx)
    return boxes.send(tensor, pp_rank) if boxes else _start(dist.isend, tensor, pp_rank, ctx)


def _mailboxes(tensor: torch.Tensor, ctx: ParallelContext) -> shared_memory.Mailboxes | None:
    """Return what moves this tensor between CPU ranks of one host; None where torch.distributed has
    to. The first call is one of all ranks of the pipeline."""
    if ctx.device.type != "cpu":
        return None
    assert ctx.pp_group  # this rank sends to another one of the pipeline
    boxes = shared_memory.shared_by(ctx.pp_group, shared_memory.Mailboxes)
    return boxes if tensor.nbytes <= shared_memory.SLOT_BYTES else None


def _start(operation, tensor: torch.Tensor, pp_rank: int, ctx: ParallelContext) -> dist.Work:
    """Start dist.isend or dist.irecv as a separate batch."""
    transfer = dist.P2POp(operation, tensor, ctx.rank_at(pp=pp_rank), ctx.pp_group)
    (work,) = dist.batch_isend_irecv([transfer])
    return work


@spent("communication", "sum_between_stages")
def sum_between_stages(
    tensor: torch.Tensor, pp_ranks: list[int], ctx: ParallelContext, chunk: int = 1 << 22
) -> None:
    """Sum `tensor`, the gradient of a tied parameter, in place over the pipeline ranks `pp_ranks`,
    including this one.

    It uses point-to-point transfers, so any set of stages can share a parameter without a process
    group. Every rank adds in the same order, so all copies are bitwise equal. chunk: elements of
    scratch per peer.
    """
    peers = [rank for rank in pp_ranks if rank != ctx.pp_rank]
    for piece in tensor.view(-1).split(chunk):
        copies = {rank: torch.empty_like(piece) for rank in peers} | {ctx.pp_rank: piece.clone()}
        ops = [
            dist.P2POp(dist.irecv, copies[rank], ctx.rank_at(pp=rank), ctx.pp_group)
            for rank in peers
        ]
        ops += [
            dist.P2POp(dist.isend, copies[ctx.pp_rank], ctx.rank_at(pp=rank), ctx.pp_group)
            for rank in peers
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        piece.zero_()
        for rank in sorted(copies):
            piece += copies[rank]
