"""The auxiliary losses of a run: their values, and the counts of their means."""

from typing import Any

import torch
from torch import nn

from megazoo.engine.microbatch import MicroBatch
from megazoo.layers.auxiliary import AuxiliaryLosses
from megazoo.layers.layer import declared
from megazoo.parallel.axes import Axis
from megazoo.parallel.collectives import all_reduce_over, broadcast_from_stage
from megazoo.parallel.context import ParallelContext


def declared_losses(model: nn.Module) -> set[str]:
    """Return the names of the auxiliary losses that the layers of this rank declare."""
    return {name for module in model.modules() for name in declared(module, "auxiliary_losses")}


def losses_of(
    model: Any, names: set[str], batches: list[MicroBatch], labelled: torch.Tensor
) -> AuxiliaryLosses | None:
    """Return the object that collects the auxiliary losses of a run over the global batch, or None
    if no layer declares any. Every rank calls it.

    names: those that layers of any rank declare. labelled: number of labelled tokens of the global
    batch, 0-dimensional, on the ranks of the last stage.
    """
    if not names:
        return None
    ctx = model.ctx
    labelled = broadcast_from_stage(labelled.clone(), ctx.placement.last_rank, ctx)
    return AuxiliaryLosses(names, {"labels": labelled, **_counts(batches, ctx, ctx.token_axis)})


def _counts(batches: list[MicroBatch], ctx: ParallelContext, axis: Axis) -> dict[str, torch.Tensor]:
    """Return the number of rows, and of tokens without padding, of all ranks along an axis: fp64,
    0-dimensional."""
    first = ctx.cp_rank == 0 and not (ctx.sequence_parallel and ctx.tp_rank)
    rows = sum(batch.shape[0] for batch in batches) if first else 0
    tokens = sum(batch.is_token(ctx).sum() for batch in batches)
    counts = torch.stack([torch.as_tensor(n, device=ctx.device).double() for n in (rows, tokens)])
    all_reduce_over(counts, [*_parts_of_tokens(ctx), axis])
    return {"rows": counts[0], "tokens": counts[1]}


def _parts_of_tokens(ctx: ParallelContext) -> list[Axis]:
    """Return tp if its ranks have different tokens."""
    return [ctx.tp] if ctx.sequence_parallel else []


def report(model: Any, losses: AuxiliaryLosses | None) -> None:
    """Store the means over the global batch in the model's engine. Every rank calls it."""
    if losses:
        ctx = model.ctx
        axes = [*_parts_of_tokens(ctx), ctx.token_axis, ctx.pp]
        model.engine.auxiliary_losses = losses.reduced(axes)


def losses_of_one(model: Any, batch: MicroBatch, labelled: torch.Tensor) -> AuxiliaryLosses | None:
    """Return the object that collects the auxiliary losses of one batch of one replica, for a model
    without a pipeline whose loss a user differentiates. None without such losses, or under no_grad.
    """
    names = declared_losses(model)
    if not names or not torch.is_grad_enabled():
        return None
    counts = _counts([batch], model.ctx, model.ctx.cp)
    return AuxiliaryLosses(names, {"labels": labelled, **counts})
