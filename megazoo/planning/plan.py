"""What a run would need, rank by rank, before it runs: memory, FLOPs, traffic, and the pipeline's
bubble.

The numbers come from the program's own code, not from formulas: each kind of rank is built in a
virtual context and runs one micro-batch, forward and backward, on the meta device, under a meter
(see metering); the schedule's table says how often and in what order. What no tensor shows is not
counted: the CUDA context, communication buffers and the allocator's waste, some GB a rank.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

import torch

from megazoo.cli.options import Options, ParallelOptions, TrainingOptions
from megazoo.cli.rules import check_run, check_values, parse_stage_layers
from megazoo.engine.pipeline import MAX_OPEN_EXCHANGES
from megazoo.errors import UserError
from megazoo.models.base import Model
from megazoo.models.counts import flops_per_token
from megazoo.models.registry import FAMILIES, family_of
from megazoo.optim.adamw import MOMENTS, AdamW
from megazoo.optim.loss_scale import LossScale
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.deferred import WeightQueue
from megazoo.parallel.module import sum_over_copies
from megazoo.parallel.recompute import MODES
from megazoo.parallel.schedule import (
    Action,
    backward_follows,
    in_flight,
    schedule_named,
    splits_backward,
    tables_of,
    timeline,
)
from megazoo.parallel.stages import rank_of, stages_of
from megazoo.planning.meter import (
    META,
    Cost,
    boundary_shape,
    costs_of,
    costs_of_alike,
    forward_flops,
    is_alone,
)

LARGEST_TP = 8  # in a search: tensor-parallel ranks that share a node
LARGEST_VIRTUAL = 4  # in a search
# In a search: FLOPs in the time of one byte sent, of an H100 at 500 TFLOP/s with 450 GB/s in a
# node, 50 GB/s outside.
FLOPS_A_BYTE = {"tp": 1_000, "pp": 10_000, "dp": 10_000}


# What a rank takes.


@dataclass
class RankPlan:
    """Of one rank, and of all that are like it: the ranks `tp` of pipeline rank `pp`, in each
    replica.

    Bytes on the device: weights, gradients, optimizer, total, and activations: the rest of the
    total, which is the peak (in a step of one micro-batch gradients come while activations go).
    optimizer_host: bytes on the CPU.
    in_flight: micro-batches whose activations are held at once. Of a step: flops, with what is
    recomputed, and the bytes that the rank sends over tp, pp and dp.
    """

    pp: int
    tp: list[int]
    layers: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    optimizer_host: int
    activations: int
    total: int
    in_flight: int
    flops: float
    sent_tp: float
    sent_pp: float
    sent_dp: float


@dataclass
class Plan:
    """Of a run. parameters: of the whole model. microbatches: of a replica. bubble: idle time over
    work, of all ranks, if all stages are alike; bubble_of_stages: if each action takes as long as
    its FLOPs; step_flops: the FLOPs of a rank in the time that a step then takes, idle time
    included. model_flops_per_token: forward and backward, nothing twice: what MFU counts.
    """

    model: str
    parameters: int
    layout: dict
    batch: dict
    microbatches: int
    bubble: float
    bubble_of_stages: float
    step_flops: float
    model_flops_per_token: float
    ranks: list[RankPlan]

    def as_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class FoundLayout:
    """What a search has found. Of a step, of the rank that has most: total bytes of memory, and
    bytes sent over tp, pp and dp. bubble, step_flops: as bubble_of_stages and step_flops in Plan.
    time: step_flops, and as many more for each byte as FLOPS_A_BYTE says: what layouts are ranked
    by."""

    tp: int
    pp: int
    dp: int
    virtual_pp: int
    recompute: str
    sequence_parallel: bool
    zero: int
    microbatches: int
    total: int
    bubble: float
    sent_tp: float
    sent_pp: float
    sent_dp: float
    step_flops: float
    time: float


class Planner:
    """Plans runs of a model. What it has metered of a kind of rank it uses again, in other layouts,
    too.

    quick: meter a few layers of each stage only (see costs_of_alike).
    """

    def __init__(self, config, quick: bool = False):
        self.config, self.family, self.quick = config, FAMILIES[family_of(config)], quick
        self._known: dict[tuple, list[dict[str, Cost]] | Static] = {}

    def check(self, parallel: ParallelOptions, training: TrainingOptions, dp: int) -> None:
        """Raise UserError if pretrain_gpt.py would refuse the run, or dp can't be."""
        options = Options(parallel=parallel, training=training)
        options.data.data, options.optimizer.min_lr = ("mock",), 0.0  # data play no part
        check_values(options)
        if dp < 1:
            raise UserError(f"dp {dp} must be at least 1")
        check_run(options, self.family, self.config, SimpleNamespace(vocab_size=0), dp)

    def plan(self, parallel: ParallelOptions, training: TrainingOptions, dp: int = 1) -> Plan:
        """The plan of a run that `check` allows."""
        p, t = parallel, training
        microbatches = t.global_batch_size // (dp * t.micro_batch_size)
        tables = tables_of(schedule_named(p.schedule), p.pp, p.virtual_pp, microbatches)
        ranks, slowest, counted, model_flops = [], {}, 0, 0.0
        for pp_rank in range(p.pp):
            alike: dict[tuple, RankPlan] = {}
            for tp_rank in range(p.tp):
                model = self.build(p, dp, pp_rank, tp_rank)
                entries = list(model.entries())
                for entry in entries:
                    for piece in entry.counted_pieces(model.ctx):
                        counted += math.prod(stop - start for start, stop in piece.box)
                costs = self.costs(model, p, t, tables[pp_rank])
                useful = self.costs(model, p, replace(t, recompute="none"), tables[pp_rank])
                model_flops += sum(cost.flops for each in useful for cost in each.values())
                for stage, each in zip(model.stages, costs, strict=True):
                    for kind, cost in each.items():
                        slowest[kind, stage.index] = max(
                            cost.flops, slowest.get((kind, stage.index), 0)
                        )
                if (key := tuple(_keys(model))) not in alike:
                    alike[key] = self.rank_plan(model, p, t, tables[pp_rank], costs)
                alike[key].tp.append(tp_rank)
            ranks += alike.values()
        alike_bubble, _ = _bubble(tables, None)
        bubble, step_flops = _bubble(tables, slowest)
        tokens = t.micro_batch_size * t.seq_length
        names = (
            "tp",
            "pp",
            "virtual_pp",
            "stage_layers",
            "sequence_parallel",
            "schedule",
            "zero",
            "offload_optimizer",
        )
        layout = {name: getattr(p, name) for name in names} | {"dp": dp}
        names = (
            "micro_batch_size",
            "global_batch_size",
            "seq_length",
            "dtype",
            "recompute",
            "recompute_interval",
        )
        batch = {name: getattr(t, name) for name in names}
        return Plan(
            family_of(self.config), counted, layout, batch, microbatches, alike_bubble, bubble, step_flops,
            model_flops / tokens, ranks,
        )  # fmt: skip

    def search(
        self, gpus: int, memory: int, parallel: ParallelOptions, training: TrainingOptions
    ) -> Iterator["FoundLayout"]:
        """The layouts of `gpus` ranks of which each fits into `memory` bytes, in no order.

        Searched are tp (a power of two, at most LARGEST_TP), pp (no deeper than what fits without
        recomputation), dp, virtual-pp (at most LARGEST_VIRTUAL, where it divides the layers), and
        recompute: the least that fits. Sequence parallelism and ZeRO-1 send no more than what they
        replace, so that they are on where tp and dp are above 1. The rest is as given. Of the tp
        ranks the first is looked at: if one has more, it does.
        """
        if gpus < 1:
            raise UserError(f"gpus {gpus} must be at least 1")
        one = replace(training, global_batch_size=training.micro_batch_size)
        self.check(replace(parallel, tp=1, pp=1, virtual_pp=1, stage_layers="balanced"), one, 1)
        for tp in (1 << n for n in range(LARGEST_TP.bit_length())):
            for pp in (
                n for n in range(1, min(gpus, self.config.layers) + 1) if gpus % (tp * n) == 0
            ):
                dp, enough = gpus // (tp * pp), False
                deep = [
                    v for v in range(2, LARGEST_VIRTUAL + 1) if self.config.layers % (pp * v) == 0
                ]
                for virtual in [1, *(deep if pp > 1 else ())]:
                    how = {
                        "tp": tp,
                        "pp": pp,
                        "virtual_pp": virtual,
                        "sequence_parallel": tp > 1,
                        "zero": int(dp > 1),
                    }
                    layout = replace(parallel, **how, stage_layers="balanced")
                    try:
                        self.check(layout, training, dp)
                    except UserError:
                        continue
                    for recompute in MODES:
                        if found := self._fitting(
                            layout, replace(training, recompute=recompute), dp, memory
                        ):
                            yield found
                            enough |= recompute == "none"
                            break
                if enough:
                    break

    def _fitting(
        self, parallel: ParallelOptions, training: TrainingOptions, dp: int, memory: int
    ) -> "FoundLayout | None":
        """The layout, if each rank fits."""
        p, t = parallel, training
        microbatches = t.global_batch_size // (dp * t.micro_batch_size)
        models: dict[tuple, Model] = {}
        ranks, flops, tables = [], {}, []
        for pp_rank in range(p.pp):
            stages = self.family.all_stages(self.config, self.context(p, dp, pp_rank, 0))[
                pp_rank :: p.pp
            ]
            alike = tuple((stage.first, stage.last, len(stage.layers)) for stage in stages)
            if alike not in models:
                models[alike] = self.build(p, dp, pp_rank, 0)
                if self.static(models[alike], p, t).device_bytes > memory:
                    return None
            tables.append(schedule_named(p.schedule)(pp_rank, p.pp, p.virtual_pp, microbatches))
            costs = self.costs(models[alike], p, t, tables[-1])
            ranks.append(self.rank_plan(models[alike], p, t, tables[-1], costs))
            if ranks[-1].total > memory:
                return None
            flops |= {
                (kind, stage.index): cost.flops
                for stage, each in zip(stages, costs, strict=True)
                for kind, cost in each.items()
            }
        bubble, step_flops = _bubble(tables, flops)
        sent = {axis: max(getattr(rank, f"sent_{axis}") for rank in ranks) for axis in FLOPS_A_BYTE}
        time = step_flops + sum(n * FLOPS_A_BYTE[axis] for axis, n in sent.items())
        return FoundLayout(
            p.tp, p.pp, dp, p.virtual_pp, t.recompute, p.sequence_parallel, p.zero, microbatches,
            max(rank.total for rank in ranks), bubble, sent["tp"], sent["pp"], sent["dp"], step_flops, time,
        )  # fmt: skip

    def context(
        self, parallel: ParallelOptions, dp: int, pp_rank: int, tp_rank: int
    ) -> ParallelContext:
        """The virtual context of a rank, on meta."""
        p = parallel
        world = ParallelContext.virtual(
            p.tp,
            p.pp,
            dp,
            sequence_parallel=p.sequence_parallel,
            virtual=p.virtual_pp,
            stage_layers=parse_stage_layers(p.stage_layers),
        )
        return replace(world, rank=world.rank_at(pp=pp_rank, tp=tp_rank), device=META)

    def build(self, parallel: ParallelOptions, dp: int, pp_rank: int, tp_rank: int) -> Model:
        """A rank's stages, without memory."""
        return self.family.on_meta(self.config, self.context(parallel, dp, pp_rank, tp_rank))

    def costs(
        self,
        model: Model,
        parallel: ParallelOptions,
        training: TrainingOptions,
        table: list[Action],
    ) -> list[dict[str, Cost]]:
        """What the actions of each stage of a rank take that runs `table`."""
        t, later = training, splits_backward(parallel.schedule, parallel.pp, parallel.virtual_pp)
        how = (
            parallel.tp,
            model.ctx.sequence_parallel,
            later,
            t.micro_batch_size,
            t.seq_length,
            t.dtype,
        )
        how += (is_alone(table), backward_follows(table, model.ctx.stage_count - 1))
        how += (t.recompute, t.recompute == "full" and t.recompute_interval)
        keys = [(*how, key) for key in _keys(model)]
        if new := [number for number, key in enumerate(keys) if key not in self._known]:
            # Replicas change nothing here, and without them the buckets sum nothing.
            ctx = self.context(parallel, 1, model.ctx.pp_rank, model.ctx.tp_rank)
            low = self.family.empty(self.config, ctx, dtype=getattr(torch, t.dtype))
            low.recompute(t.recompute, t.recompute_interval)
            buckets = low.gradient_buckets  # they say of what precision gradients are
            queue = WeightQueue(buckets.received) if later else None
            with low._gradients_later(queue):
                for number in new:
                    if keys[number] not in self._known:
                        of_stage = costs_of_alike if self.quick else costs_of
                        self._known[keys[number]] = of_stage(
                            low, low.stages[number], t, queue, table
                        )
        return [self._known[key] for key in keys]

    def rank_plan(
        self,
        model: Model,
        parallel: ParallelOptions,
        training: TrainingOptions,
        table: list[Action],
        costs: list,
    ) -> RankPlan:
        """What a rank takes that runs `table`; `tp` is left empty. costs: of its stages' actions."""
        ctx, static = model.ctx, self.static(model, parallel, training)
        pp_rank = rank_of(table[0].stage, ctx.pp_size)  # of the model's or of one that is like it
        by_stage = dict(zip(stages_of(pp_rank, ctx.pp_size, ctx.virtual_size), costs, strict=True))
        itemsize = getattr(torch, training.dtype).itemsize
        boundary = math.prod(boundary_shape(training, model)) * itemsize if ctx.pp_size > 1 else 0
        # that are on their way
        activations = round(_peak(table, by_stage)) + (MAX_OPEN_EXCHANGES + 1) * boundary
        if is_alone(table):
            activations -= static.gradients  # that the actions have counted
        last = ctx.stage_count - 1
        sends = sum(
            a.stage < last if a.kind == "F" else a.stage > 0 for a in table if a.kind != "W"
        )
        return RankPlan(
            pp=pp_rank,
            tp=[],
            layers=sum(len(stage.layers) for stage in model.stages),
            parameters=static.parameters,
            weights=static.weights,
            gradients=static.gradients,
            optimizer=static.optimizer,
            optimizer_host=static.optimizer_host,
            activations=activations,
            total=activations + static.device_bytes,
            in_flight=in_flight(table),
            flops=sum(by_stage[a.stage][a.kind].flops for a in table),
            sent_tp=sum(by_stage[a.stage][a.kind].sent for a in table) + static.sent_tp,
            sent_pp=sends * boundary + static.sent_tied,
            sent_dp=static.sent_dp,
        )

    def static(
        self, model: Model, parallel: ParallelOptions, training: TrainingOptions
    ) -> "Static":
        """What a rank has all the time, and what it sends after the last backward."""
        dp, tied = model.ctx.dp_size, tuple(model.tied.values())
        how = (
            parallel.tp,
            model.ctx.sequence_parallel,
            dp,
            parallel.zero,
            parallel.offload_optimizer,
            training.dtype,
        )
        key = (*how, tied, *_keys(model))
        if key not in self._known:
            low = self.family.empty(self.config, model.ctx, dtype=getattr(torch, training.dtype))
            self._known[key] = _static(low, parallel)
        return self._known[key]


@dataclass(frozen=True)
class Static:
    """Bytes that a rank has all the time, as in RankPlan, and those that it sends after the last
    backward."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    optimizer_host: int
    sent_tp: float
    sent_tied: float
    sent_dp: float

    @property
    def device_bytes(self) -> int:
        return self.weights + self.gradients + self.optimizer


def _static(model: Model, parallel: ParallelOptions) -> Static:
    ctx, entries = model.ctx, list(model.entries())
    states = list(AdamW(model, zero=parallel.zero, loss_scale=LossScale()).state.values())
    here = sum(tensor.nbytes for state in states for tensor in state.values())
    # Offloaded, it has fp32 masters whatever the dtype: as much again as one of the two moments.
    there = sum(state[name].nbytes for state in states for name in (*MOMENTS, MOMENTS[0]))
    before, buckets = ctx.tp_group.sent if ctx.tp_group else 0.0, model.gradient_buckets
    buckets.complete()
    sum_over_copies(
        [(e.parameter.grad, e.spec) for e in entries if e.spec.has_partial_gradient(ctx)], ctx
    )
    buckets.finish()
    if buckets.sharded:
        buckets.gather()
    return Static(
        parameters=sum(e.parameter.numel() for e in entries),
        weights=sum(e.parameter.nbytes for e in entries),
        gradients=buckets.nbytes,
        optimizer=0 if parallel.offload_optimizer else here,
        optimizer_host=there if parallel.offload_optimizer else 0,
        sent_tp=(ctx.tp_group.sent if ctx.tp_group else 0.0) - before,
        sent_tied=sum((len(e.stages) - 1) * e.parameter.grad.nbytes for e in entries),
        sent_dp=ctx.dp_group.sent if ctx.dp_group else 0.0,
    )


def _keys(model: Model) -> list[tuple]:
    """Of each stage, equal for those that do alike: as many layers, of the same shapes, though of
    other numbers.

    What is in no layer belongs to the first stage or the last.
    """
    layers: dict[int | None, list] = {}
    for name, parameter in model.named_parameters():
        match = re.match(r"layers\.(\d+)\.(.*)", name)
        number, rest = (int(match[1]), match[2]) if match else (None, name)
        layers.setdefault(number, []).append((rest, tuple(parameter.shape)))
    keys = []
    for stage in model.stages:
        outside = tuple(layers.get(None, ())) if stage.first or stage.last else ()
        keys.append(
            (stage.first, stage.last, outside, tuple(tuple(layers[i]) for i in stage.layers))
        )
    return keys


def _peak(table: list[Action], costs: dict[int, dict[str, Cost]]) -> float:
    """The most bytes that live on a rank at once, of all its micro-batches."""
    held: dict[tuple[int, int], float] = {}
    total = peak = 0.0
    for action in table:
        cost, own = costs[action.stage][action.kind], held.get(action[1:], 0.0)
        peak = max(peak, total - own + cost.peak)
        held[action[1:]] = cost.held
        total += cost.held - own
    return peak


def _bubble(tables: list[list[Action]], cost: dict | None) -> tuple[float, float]:
    """Idle time over work of all ranks, and the time of a step."""
    spans = timeline(tables, cost).values()
    work, end = sum(span.end - span.start for span in spans), max(span.end for span in spans)
    return len(tables) * end / work - 1, end


def note_on_mfu(config, seq_length: int) -> str | None:
    """Say, of a model of a user's own, that MFU counts other FLOPs than those that run; None if it
    doesn't.

    A backward takes twice the FLOPs of its forward, which is run on the meta device.
    """
    ctx = ParallelContext(device=META)
    model = FAMILIES[family_of(config)].empty(config, ctx)
    runs = 3 * forward_flops(model, 1, seq_length) / seq_length
    counted = flops_per_token(config, seq_length)
    if abs(counted / runs - 1) < 0.01:
        return None
    what = f"MFU counts {counted:.4g} FLOPs a token where {runs:.4g} run"
    return (
        f"note: {what}: docs/new_model.md says how a module tells its score_features and multiplied"
    )
