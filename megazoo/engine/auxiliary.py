"""The auxiliary losses of a run: their values, and the counts of their means."""

from collections.abc import Iterable
from typing import Any

import torch

from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError
from megazoo.layers.auxiliary import AuxiliaryLosses
from megazoo.layers.layer import declared
from megazoo.parallel.axes import Axis
from megazoo.parallel.collectives import all_reduce_over, broadcast_from_stage
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.parallel.schedule import Exchange, schedule_named


def declared_losses(model: Any) -> dict[str, int] | None:
    """Return the names of the auxiliary losses that the layers of this rank declare, with the size
    of a joint loss, and 0 for other losses. None if no layer has losses or counts tokens."""
    names: dict[str, int] = {}
    counts = False
    for module in model.modules():
        counts |= declared(module, "counts_tokens")
        names |= dict.fromkeys(declared(module, "auxiliary_losses"), 0) | names
        names |= declared(module, "joint_losses")
    return names if names or counts else None


def counts_tokens(model: Any) -> bool:
    """Return whether any layer of the model, of all stages, declares auxiliary losses or counts
    tokens. Its batches must then mark their padding. model: of any stage."""
    return declared_losses(type(model).on_meta(model.config, ParallelContext())) is not None


def check_order(names: dict[str, int] | None, table: Iterable, count: int) -> None:
    """Raise UserError if there are joint losses, and a forward follows a backward.

    table: of the last stage's rank, the same on every rank. count: number of micro-batches.
    """
    kinds = "".join(item.kind for item in table if not isinstance(item, Exchange))
    joint = sorted(name for name, size in (names or {}).items() if size)
    if joint and "F" in kinds.lstrip("F"):
        raise UserError(
            f"the auxiliary loss {joint[0]} is over the whole batch, so all {count} forwards must "
            "precede the first backward: use schedule gpipe, or one micro-batch"
        )


def check_joint_losses(names: dict[str, int] | None, layout: Layout, count: int) -> None:
    """Raise UserError if there are joint losses, and the schedule of a layout does not support
    them. names: see `declared_losses`. count: number of micro-batches."""
    if any((names or {}).values()):
        schedule, last = schedule_named(layout.schedule), layout.placement.last_rank
        check_order(names, schedule(last, layout.pp, layout.virtual_pp, count), count)


def _axes_of_means(ctx: ParallelContext, axis: Axis) -> list[Axis]:
    """Return the axes along which ranks have other tokens or layers. axis: token_axis or cp."""
    return [*_parts_of_tokens(ctx), axis, ctx.pp]


def losses_of(
    model: Any,
    names: dict[str, int] | None,
    batches: list[MicroBatch],
    labelled: torch.Tensor,
    axis: Axis,
) -> AuxiliaryLosses | None:
    """Return the object that collects the auxiliary losses of a run, or None if no layer declares
    any, or counts tokens. All ranks of the run call it.

    names: see `declared_losses`; those of layers of any stage. labelled: number of labelled tokens,
    0-dimensional, on the ranks of the last stage. axis: the ranks with other tokens of the mean:
    token_axis for the global batch, cp for the batch of one replica.
    """
    if names is None:
        return None
    ctx = model.ctx
    labelled = broadcast_from_stage(labelled.clone(), ctx.placement.last_rank, ctx)
    counts = {"labels": labelled, **_counts(batches, ctx, axis)}
    return AuxiliaryLosses(names, counts, _axes_of_means(ctx, axis))


def losses_on_meta(model: Any) -> AuxiliaryLosses | None:
    """Return the object that collects the auxiliary losses of one stage on the meta device,
    without sums over the ranks; None if no layer of the rank declares any."""
    names = declared_losses(model)
    if names is None:
        return None
    counts = {what: torch.ones((), device="meta") for what in ("labels", "tokens", "rows")}
    losses = AuxiliaryLosses(names, counts)
    for loss in losses.joint.values():
        loss.is_summed = True
    return losses


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
    """Store the means over the global batch in the model's engine, and pass the counts of tokens to
    the layers. Every rank calls it."""
    if losses:
        ctx = model.ctx
        model.engine.auxiliary_losses = losses.reduced(_axes_of_means(ctx, ctx.token_axis))
        losses.pass_counts([*_parts_of_tokens(ctx), ctx.token_axis])
