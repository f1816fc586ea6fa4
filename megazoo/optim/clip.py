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
    """Scale the gradients so that the global norm of the whole model is at most max_norm.

    Use it with a custom optimizer; AdamW and Muon clip themselves.
    (`torch.nn.utils.clip_grad_norm_` would use the norm of only this rank's part.) Every rank calls
    it, after `train_batch`, or after `sync_gradients` for a custom backward.

    Args:
        model: the model.
        max_norm: largest norm; infinity: no clipping.

    Returns:
        The norm before clipping, fp32, 0-dimensional.

    Raises:
        UserError: The gradients are incomplete.

    Example:
        model.train_batch(ids, labels=ids)
        norm = clip_grad_norm(model, 1.0)
        custom_optimizer.step()
    """
    check_model(model, "clip_grad_norm(model, max_norm)")
    with propagate_errors(model.ctx):
        check_max_norm("max_norm", max_norm)
        buckets, entries = model.engine.gradients.fit(), model.trained_entries()
        buckets.check()
        norm = global_norm(entries, buckets)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    with_gradient = [entry for entry in entries if buckets.has(entry.parameter)]
    scale_each(
        [
            buckets.own(entry.parameter) if buckets.zero > 1 else entry.gradient
            for entry in with_gradient
        ],
        factor,
    )
    return norm


@torch.no_grad()
def global_norm(entries: list[NamedParameter], buckets: GradientBuckets) -> torch.Tensor:
    """Return the 2-norm of the gradient of the whole model, fp32. Copies over tp, between tied
    stages and between replicas count once.

    entries: the trained parameters of this rank. Every rank calls it.
    """
    ctx = buckets.ctx
    counted = [_counted(entry, buckets) for entry in entries if buckets.has(entry.parameter)]
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
    """Return the divisor of gradients with this norm: 1 if it is not above max_norm."""
    return torch.where(norm > max_norm, (norm + 1e-6) / max_norm, 1.0)


def element_range(entry: NamedParameter, buckets: GradientBuckets, replica: int) -> tuple[int, int]:
    """Return the range (first, last + 1) of the flattened parameter whose reduced gradient a
    replica holds."""
    if not buckets.sharded:
        return 0, entry.parameter.numel()
    return buckets.range_of(entry.parameter, replica)


def _counted(entry: NamedParameter, buckets: GradientBuckets) -> list[torch.Tensor]:
    """Return views of the parts of the gradient that this rank counts."""
    pieces, parameter = entry.counted_pieces(buckets.ctx), entry.parameter
    if not buckets.sharded:
        if buckets.ctx.folded and not entry.is_first_replica(buckets.ctx):
            return []  # the sum is over the token axis
        return [entry.gradient[piece.index()] for piece in pieces]
    ranges = [(0, parameter.numel())]
    if not counts_whole(entry, buckets.ctx):
        # Copies that don't count are full rows; RowParallelLinear has none.
        width = math.prod(parameter.shape[1:])
        rows = [piece.index()[0] for piece in pieces]
        ranges = [(each.start * width, each.stop * width) for each in rows]
    first, last = element_range(entry, buckets, buckets.axis_of(parameter).rank)
    ours = [(max(first, start) - first, min(last, stop) - first) for start, stop in ranges]
    gradient = buckets.own(parameter)
    return [gradient[start:stop] for start, stop in ours if start < stop]


def counts_whole(entry: NamedParameter, ctx: ParallelContext) -> bool:
    """Return whether all elements of this rank's part of a parameter count."""
    pieces = entry.counted_pieces(ctx)
    return sum(volume(piece.box) for piece in pieces) == entry.parameter.numel()


def counts_here(entry: NamedParameter, buckets: GradientBuckets) -> bool:
    """Return whether all elements of this rank's part of a parameter count on this rank, in the
    norm that `global_norm` computes."""
    counted = buckets.sharded or not buckets.ctx.folded or entry.is_first_replica(buckets.ctx)
    return counted and counts_whole(entry, buckets.ctx)


def square_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares in float64: fp32 sums over 10 million elements have errors of 4e-4.

    It works in pieces that are small enough for one thread. On busy cores, the threads of a pool
    wait for each other longer than they compute.
    """
    pieces = tensor.reshape(-1).split(1 << 15)
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    return torch.stack(norms).square().sum()


def square_sum_at_once(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of one or more tensors in float64: on CUDA with a few kernels."""
    return norm_of_each(tensors).square().sum()


def check_max_norm(name: str, value: float) -> None:
    """Raise UserError unless a value is a valid norm limit: from 0 to infinity (no clipping)."""
    if value != math.inf:
        check_number(name, value, 0)


def check_model(model: Any, call: str) -> None:
    """Raise UserError, with the right call, if model is not a megazoo model, e.g. its
    parameters."""
    if not isinstance(model, nn.Module):
        raise UserError(f"pass a megazoo model, not its parameters: {call}")
    if not hasattr(model, "trained_entries"):
        raise UserError(f"pass a megazoo model, not a {type(model).__name__}: {call}")
