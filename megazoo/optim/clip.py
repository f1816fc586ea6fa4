"""The global norm of the gradients, and clipping by it."""

import math
from typing import Any

import torch
from torch import nn

from megazoo.errors import UserError, check_number
from megazoo.parallel.buckets import GradientBuckets
from megazoo.parallel.collectives import all_reduce_over
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.module import NamedParameter
from megazoo.parallel.shard import volume
from megazoo.torch_internals import norm_of_each, scale_each


@torch.no_grad()
def clip_grad_norm(model: Any, max_norm: float) -> torch.Tensor:
    """Scale the gradients so that the norm of the whole model's is at most max_norm; returns the
    norm before, fp32.

    For an optimizer of your own: `torch.nn.utils.clip_grad_norm_` would take the norm of this
    rank's part alone. Every rank calls it, after `train_batch`, or after `sync_gradients` where the
    backward was yours; megazoo's AdamW clips by itself. UserError if the gradients are not whole
    yet.
    """
    check_model(model, "clip_grad_norm(model, max_norm)")
    with propagate_errors(model.ctx):
        check_max_norm("max_norm", max_norm)
        buckets, entries = model.engine.fit_buckets(), model.trained_entries()
        buckets.check()
        norm = global_norm(entries, buckets)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scale_each([e.parameter.grad for e in entries if e.parameter.grad is not None], factor)
    return norm


@torch.no_grad()
def global_norm(entries: list[NamedParameter], buckets: GradientBuckets) -> torch.Tensor:
    """Compute the 2-norm of the whole model's gradient, fp32: copies over tp or between tied stages
    count once, and so do those of replicas.

    entries: those of this rank that are not frozen. Every rank calls it.
    """
    ctx = buckets.ctx
    counted = [_counted(entry, buckets) for entry in entries if entry.parameter.grad is not None]
    total = torch.zeros((), dtype=torch.float64, device=ctx.device)
    if ctx.device.type == "cuda":
        parts = [part for parts in counted for part in parts]
        total += square_sum_at_once(parts) if parts else 0
    else:
        for parts in counted:
            total += sum(map(square_sum, parts))
    shared_out = [ctx.token_axis] if buckets.sharded or ctx.folded else []
    all_reduce_over(total, [ctx.tp, ctx.pp, *shared_out])
    return total.sqrt().float()


def clip_scale(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return what gradients of this norm are to be divided by: 1 where it is not over max_norm."""
    return torch.where(norm > max_norm, (norm + 1e-6) / max_norm, 1.0)


def element_range(entry: NamedParameter, buckets: GradientBuckets, replica: int) -> tuple[int, int]:
    """Return of which elements of a parameter, flattened, a replica has the summed gradient:
    (first, last + 1)."""
    if not buckets.sharded:
        return 0, entry.parameter.numel()
    return buckets.range_of(entry.parameter, replica)


def _counted(entry: NamedParameter, buckets: GradientBuckets) -> list[torch.Tensor]:
    """Return the parts of the gradient whose elements this rank counts, as views of it."""
    gradient, pieces = entry.gradient, entry.counted_pieces(buckets.ctx)
    if not buckets.sharded:
        if buckets.ctx.folded and not entry.is_first_replica(buckets.ctx):
            return []  # the sum goes over the token axis
        return [gradient[piece.index()] for piece in pieces]
    ranges = [(0, gradient.numel())]
    if not counts_whole(entry, buckets.ctx):
        # Copies that don't count are of whole rows: RowParallelLinear has none.
        width = gradient[0].numel()
        rows = [piece.index()[0] for piece in pieces]
        ranges = [(each.start * width, each.stop * width) for each in rows]
    first, last = element_range(entry, buckets, buckets.axis_of(entry.parameter).rank)
    ours = [(max(first, start), min(last, stop)) for start, stop in ranges]
    return [gradient.view(-1)[start:stop] for start, stop in ours if start < stop]


def counts_whole(entry: NamedParameter, ctx: ParallelContext) -> bool:
    """Say whether all elements of this rank's part of a parameter count: none is another's copy."""
    pieces = entry.counted_pieces(ctx)
    return sum(volume(piece.box) for piece in pieces) == entry.parameter.numel()


def square_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum the squares in float64: fp32 sums over 10 million elements are off by 4e-4.

    A piece at a time, each small enough for one thread: where the cores are busy, the threads of a
    pool wait for one another longer than they compute.
    """
    pieces = tensor.reshape(-1).split(1 << 15)
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    return torch.stack(norms).square().sum()


def square_sum_at_once(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sum the squares of all tensors, at least one, in float64: on CUDA by a few kernels."""
    return norm_of_each(tensors).square().sum()


def check_max_norm(name: str, value: float) -> None:
    """Raise UserError unless a value is a largest norm: from 0 to infinity, which never clips."""
    if value != math.inf:
        check_number(name, value, 0)


def check_model(model: Any, call: str) -> None:
    """Raise UserError, with the right call, if what should be a model is not one: its parameters,
    say."""
    if not isinstance(model, nn.Module):
        raise UserError(f"give a megazoo model, not its parameters: {call}")
    if not hasattr(model, "trained_entries"):
        raise UserError(f"give a megazoo model, not a {type(model).__name__}: {call}")
