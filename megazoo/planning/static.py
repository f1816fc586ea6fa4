"""Measure the permanent memory of a rank in bytes: weights, gradients and optimizer state."""

from dataclasses import dataclass

import torch.distributed as dist

from megazoo.models.base import Model
from megazoo.optim.adamw import AdamW
from megazoo.optim.base import AVERAGE, MOMENTS, MOMENTUM
from megazoo.optim.loss_scale import LossScale
from megazoo.optim.muon import Muon
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.groups import VirtualGroup
from megazoo.parallel.module import sum_over_copies
from megazoo.parallel.storage import storage_of
from megazoo.planning.run import PlannedRun


@dataclass(frozen=True)
class Static:
    """The permanent memory of a rank, in bytes as in RankPlan, the bytes per step that it sends for
    gradients and parameters, and the FLOPs of the matrix products of its optimizer.

    sent_early: the part of sent_dp that is sent during the last backward, to reduce gradients. The
    rest is sent after it. leaving: bytes that reducing takes during a backward in addition to
    `gradients`. sent_each: bytes that each backward sends over dp before the last one. gathered:
    under ZeRO-3, bytes of the units of parameters that are in memory at the same time.
    sent_gathers: bytes per micro-batch to gather them.
    """

    parameters: int
    trainable_parameters: int
    weights: int
    gradients: int
    optimizer: int
    optimizer_host: int
    sent_tp: float
    sent_tied: float
    sent_dp: float
    sent_early: float
    optimizer_flops: float
    leaving: int = 0
    sent_each: float = 0.0
    gathered: int = 0
    sent_gathers: float = 0.0

    @property
    def device_bytes(self) -> int:
        return self.weights + self.gradients + self.optimizer


def measure_static(model: Model, run: PlannedRun) -> Static:
    """Measure the permanent memory of a rank, from its model on the meta device.

    To count the bytes sent, it reduces the gradients as after the last backward of a step, and lets
    Muon gather matrices.
    """
    ctx, entries, trained = model.ctx, list(model.entries()), model.trained_entries()
    states, optimizer = [], None
    if trained:  # a single rank can't make an optimizer without parameters
        kind = {"adamw": AdamW, "muon": Muon}[run.optimizer]
        zero = model.ctx.layout.zero
        optimizer = kind(model, zero=zero, ema=run.ema, loss_scale=LossScale())
        states = list(optimizer.state.values())
    here = sum(tensor.nbytes for state in states for tensor in state.values())
    # With offloading there are fp32 master weights for every dtype, as large as one of the moments.
    there = sum(
        state[name].nbytes
        for state in states
        if MOMENTS[0] in state
        for name in (*MOMENTS, MOMENTS[0], *([AVERAGE] if run.ema else []))
    )
    buckets = model.engine.gradients.buckets
    before = _sent(ctx.tp_group)
    before_dp = _sent_to_replicas(ctx)
    buckets.fill_missing()
    sum_over_copies(
        [(e.gradient, e.spec) for e in trained if e.spec.has_partial_gradient(ctx)], ctx
    )
    buckets.wait_for_sums()
    sums = _sent_to_replicas(ctx) - before_dp
    # the share of each bucket
    shares = [s * (a.size - 1) / a.size for s, a in zip(buckets.sizes, buckets.axes, strict=True)]
    early = sums * sum(shares[: buckets.early]) / max(1, sum(shares))
    often = ctx.layout.reduces_often
    if buckets.sharded:
        buckets.gather()
    flops = 0.0
    if isinstance(optimizer, Muon):
        for whole in optimizer.wholes:
            whole.apply(
                lambda matrix, _: matrix,
                lambda which, whole=whole: optimizer.state[which.entry.name][MOMENTUM][
                    whole.mine(which)
                ],
                lambda *_: None,
            )
        flops = optimizer.step_flops
    storage = storage_of(model)
    units = [
        [flat.size * flat.own.itemsize for flat in flats]
        for flats in (storage.flats.values() if storage else ())
    ]
    kept, stored = (storage.kept, storage.place) if storage else (None, {})
    flats = storage.every_flat() if storage else []
    # In forward and in backward; recomputing many layers together frees the first ones again.
    again = bool(kept) and run.recompute == "full" and run.recompute_interval > kept
    times = 3 if again else 2
    gather = sum(flat.own.nbytes * (flat.axis.size - 1.0) for flat in flats)
    return Static(
        parameters=sum(e.parameter.numel() for e in entries),
        trainable_parameters=sum(e.parameter.numel() for e in trained),
        weights=sum(e.parameter.nbytes for e in entries if e.parameter not in stored)
        + sum(flat.own.nbytes for flat in flats),
        gradients=buckets.nbytes(often),
        optimizer=0 if run.offload_optimizer else here,
        optimizer_host=there if run.offload_optimizer else 0,
        sent_tp=_sent(ctx.tp_group) - before,
        sent_tied=sum((len(e.pp_ranks) - 1) * 4.0 * e.parameter.numel() for e in trained),
        sent_dp=_sent_to_replicas(ctx) - before_dp + (0.0 if kept else gather),
        sent_early=early,
        optimizer_flops=flops,
        leaving=buckets.leaving_bytes(often),
        sent_each=early if often else 0.0,
        gathered=sum(sorted(map(sum, units), reverse=True)[:kept]),
        sent_gathers=times * gather if kept else 0.0,
    )


def _sent_to_replicas(ctx: ParallelContext) -> float:
    """Return the bytes sent so far over the token axis, and to the replicas of weights that folded
    axes shard."""
    axes = [ctx.token_axis, *(axis.replicas for axis in ctx.folded.values())]
    return sum(_sent(axis.group) for axis in axes)


def _sent(group: dist.ProcessGroup | None) -> float:
    """Return the bytes sent so far over a group of a virtual context."""
    return group.sent if isinstance(group, VirtualGroup) else 0.0
