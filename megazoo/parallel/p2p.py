"""Point-to-point exchange between the stages of the pipeline."""

import torch
import torch.distributed as dist

from megazoo.parallel.context import ParallelContext
from megazoo.parallel.cpu import shared_memory
from megazoo.parallel.timing import spent


def exchange_with_stages(
    receives: list[tuple[torch.Tensor, int]],
    sends: list[tuple[torch.Tensor, int]],
    ctx: ParallelContext,
) -> tuple[list[list], list]:
    """Start receiving into tensors from pipeline ranks, and sending tensors to them, in one go.

    Returns, for each tensor to come, the works to wait for before it is read; and the works to wait
    for before what is sent may change: until then it must live. Tensors are contiguous; both sides
    know their shapes and dtypes. Between CPU ranks of one host small tensors are sent when this
    returns; it waits where too many have not been read.
    """
    boxes = (
        shared_memory.shared_by(ctx.pp_group, shared_memory.Mailboxes)
        if ctx.device.type == "cpu"
        else None
    )

    def boxed(tensor: torch.Tensor) -> bool:
        return boxes is not None and tensor.nbytes <= shared_memory.SLOT_BYTES

    ops = [(dist.irecv, *each) for each in receives] + [(dist.isend, *each) for each in sends]
    ops = [
        dist.P2POp(op, tensor, ctx.rank_at(pp=peer), ctx.pp_group)
        for op, tensor, peer in ops
        if not boxed(tensor)
    ]
    works = dist.batch_isend_irecv(ops) if ops else []
    if len(works) != len(ops):  # NCCL returns one work for all, gloo one for each
        return [works] * len(receives), works
    rest = iter(works)
    coming = [
        [boxes.receive(tensor, peer) if boxed(tensor) else next(rest)] for tensor, peer in receives
    ]
    for tensor, peer in sends:
        if boxed(tensor):
            boxes.send(tensor, peer)
    return coming, list(rest)


def start_receive(buffer: torch.Tensor, pp_rank: int, ctx: ParallelContext):
    """Start receiving into a contiguous tensor from a pipeline rank, which knows its shape and
    dtype; returns what to wait for, by its `wait()`, before it is read."""
    return exchange_with_stages([(buffer, pp_rank)], [], ctx)[0][0][0]


def start_send(tensor: torch.Tensor, pp_rank: int, ctx: ParallelContext):
    """Start sending a contiguous tensor to a pipeline rank; returns the work to wait for before the
    tensor may change, or None if it may."""
    works = exchange_with_stages([], [(tensor, pp_rank)], ctx)[1]
    return works[0] if works else None


def send_to_stage(tensor: torch.Tensor, pp_rank: int, ctx: ParallelContext):
    """Start sending to a pipeline rank, in generation and in a user's own loop over micro-batches;
    in training `exchange_with_stages` sends.

    `tensor` must live, unchanged, until the returned work is waited for.
    """
    return dist.isend(tensor, ctx.rank_at(pp=pp_rank), group=ctx.pp_group)


def receive_from_stage(
    shape: tuple[int, ...], dtype: torch.dtype, pp_rank: int, ctx: ParallelContext
) -> torch.Tensor:
    """Wait for what a pipeline rank sends next, and return it."""
    tensor = torch.empty(shape, dtype=dtype, device=ctx.device)
    dist.recv(tensor, ctx.rank_at(pp=pp_rank), group=ctx.pp_group)
    return tensor


@spent("communication", "sum_between_stages")
def sum_between_stages(
    tensor: torch.Tensor, pp_ranks: list[int], ctx: ParallelContext, chunk: int = 1 << 22
) -> None:
    """Sum `tensor`, the gradient of a tied parameter, in place over the pipeline ranks `pp_ranks`.

    This is one of them. It goes point to point, so that any set of stages can share a parameter
    without a process group of its own; every rank adds in the same order, so all copies stay equal
    to the bit. chunk: elements of scratch for each peer.
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
        piece.copy_(sum(copies[rank] for rank in sorted(copies)))
