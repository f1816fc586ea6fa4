"""The auxiliary losses of a run: their values, and the counts of their means."""

from typing import Any

import torch
from torch import nn

from megazoo.engine.microbatch import MicroBatch
from megazoo.layers.auxiliary import AuxiliaryLosses
from megazoo.layers.layer import declared
from megazoo.parallel.collectives import all_reduce, broadcast_from_stage


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
    own_rows = sum(batch.shape[0] for batch in batches) if ctx.cp_rank == 0 else 0
    rows = torch.tensor(own_rows, dtype=torch.float64, device=ctx.device)
    all_reduce(rows, ctx.token_axis.group)
    return AuxiliaryLosses(names, labelled, rows)


def report(model: Any, losses: AuxiliaryLosses | None) -> None:
    """Store the means over the global batch in the model's engine. Every rank calls it."""
    if losses:
        ctx = model.ctx
        cut_by_tp = [ctx.tp] if ctx.sequence_parallel else []
        model.engine.auxiliary_losses = losses.reduced([*cut_by_tp, ctx.token_axis, ctx.pp])


def losses_of_one(model: Any, batch: MicroBatch, labelled: torch.Tensor) -> AuxiliaryLosses | None:
    """Return the object that collects the auxiliary losses of one batch of one replica, for a model
    without a pipeline whose loss a user differentiates. None without such losses, or under no_grad.
    """
    names = declared_losses(model)
    if not names or not torch.is_grad_enabled():
        return None
    rows = torch.tensor(batch.shape[0], dtype=torch.float64, device=model.ctx.device)
    return AuxiliaryLosses(names, labelled, rows)
