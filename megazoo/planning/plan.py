"""Plan a run before it starts: memory, FLOPs and communication of every rank, and the pipeline
bubble.

The numbers come from the code of the program, not from formulas. Each kind of rank is built in a
virtual context and runs one micro-batch, forward and backward, on the meta device, under a meter
(see meter.py). The table of the schedule defines how often and in what order. Memory outside of
tensors is not counted: the CUDA context, communication buffers and fragmentation, some GB per rank.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from megazoo.engine.auxiliary import check_joint_losses, declared_losses
from megazoo.engine.transport import MAX_OPEN_EXCHANGES
from megazoo.errors import UserError
from megazoo.families.registry import FAMILIES, family_of
from megazoo.models.attachment import Attachment
from megazoo.models.base import Model
from megazoo.models.counts import flops_per_token, parameter_count, whole_model
from megazoo.models.rules import check_batch, check_layout, check_offload, check_sequence
from megazoo.parallel.actions import Action, in_flight
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.deferred import WeightQueue
from megazoo.parallel.layout import Layout
from megazoo.parallel.schedule import (
    backward_follows,
    schedule_named,
    splits_backward,
    tables_of,
    timeline,
)
from megazoo.planning.meter import (
    META,
    Cost,
    boundary_bytes,
    costs_of,
    estimate_costs,
    forward_flops,
    has_one_microbatch,
)
from megazoo.planning.ranks import Builder, counted_parameters, place_in, stage_keys
from megazoo.planning.run import PlannedRun
from megazoo.planning.static import Static, measure_static

MOST_ACTIONS = 1_000_000  # per step: each is scheduled separately
# The settings of the run that a plan contains.
BATCH = "micro_batch_size global_batch_size seq_length dtype recompute recompute_interval".split()


@dataclass
class RankPlan:
    """The requirements of a rank and of all equal ranks: the ranks `tp` of pipeline rank `pp`, in
    each replica, and all along cp.

    Bytes on the device: weights, gradients, optimizer (its state), activations, and total, the peak
    of a step. activations is the total minus the others: in a step of one micro-batch, gradients
    are allocated while activations are freed. optimizer_host: bytes of optimizer state on the CPU.
    trainable_parameters: the rank's parameters that are not frozen; only these have gradients and
    optimizer state. in_flight: the largest number of micro-batches whose activations are in memory
    together. Per step: flops, including recomputation, and the bytes that the rank sends over tp,
    pp and cp, and, for gradients and parameters, over dp and cp together (sent_dp). Bytes over axes
    that are folded into dp x cp are in sent_cp.
    """

    pp: int
    tp: list[int]
    layers: int
    parameters: int
    trainable_parameters: int
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
    sent_cp: float
    sent_dp: float


@dataclass
class Plan:
    """The requirements of a run.

    parameters: of the whole model with its adapters; copies are counted once. trainable_parameters:
    the part that is not frozen. adapter_parameters: the part of the adapters. microbatches: per
    replica and step. bubble: idle time divided by working time, over all ranks, if all stages take
    equal time. bubble_of_stages: the same if the time of each action is proportional to its FLOPs.
    step_flops: the FLOPs that a rank could do in the time of such a step. model_flops_per_token: of
    forward and backward, without recomputation, as MFU counts them.
    """

    model: str
    parameters: int
    trainable_parameters: int
    adapter_parameters: int
    layout: dict
    batch: dict
    microbatches: int
    bubble: float
    bubble_of_stages: float
    step_flops: float
    model_flops_per_token: float
    ranks: list[RankPlan]

    def as_dict(self) -> dict:
        """Return the plan as values for JSON."""
        return asdict(self)


class Planner(Builder):
    """Plan runs of a model. Measurements of a kind of rank are cached, and reused in other layouts.

    quick: measure only a few layers per stage (see estimate_costs). attached: as in Builder; the
    runs define which of its parameters are trained (train_only). Layouts are virtual contexts of
    any rank.
    """

    def __init__(self, config, quick: bool = False, attached: Attachment | None = None):
        super().__init__(config, attached)
        self.quick = quick
        self._costs: dict[tuple, dict[str, Cost]] = {}  # by kind of stage
        self._few_layers: dict[tuple, dict[str, Cost]] = {}  # the same, with only a few layers
        self._static: dict[tuple, Static] = {}  # by kind of rank

    @cached_property
    def of_model(self) -> int:
        """The number of parameters of the model without adapters."""
        return parameter_count(self.config)

    @cached_property
    def losses(self) -> dict[str, int] | None:
        """The auxiliary losses of the model: see `declared_losses`."""
        return declared_losses(whole_model(self.config))

    def check(self, layout: Layout, run: PlannedRun) -> None:
        """Raise UserError if the training program does not support the run."""
        self.trained(run.train_only)  # raises an error for names that do not exist
        microbatches, stages = run.microbatches(layout.dp), layout.placement.count
        if 2 * stages * microbatches > MOST_ACTIONS:  # a forward and a backward
            raise UserError(
                f"{microbatches} micro-batches per step are too many to plan"
                + (f" with {stages} stages" if stages > 1 else "")
            )
        check_offload(run.optimizer, run.offload_optimizer)
        check_layout(self.family, self.config, layout)
        check_batch(run.global_batch_size, run.micro_batch_size, layout.dp)
        check_sequence(self.family, self.config, run.seq_length)
        if layout.cp > 1:
            self.build(place_in(layout, 0))  # raises an error for more ranks than heads
        check_joint_losses(self.losses, layout, microbatches)

    def plan(self, layout: Layout, run: PlannedRun) -> Plan:
        """Return the plan of a run. `check` must accept the run."""
        tables = schedule_tables(layout, run)
        without_recompute = replace(run, recompute="none")
        uncut = layout.with_replicas(1, tp=1, cp=1)
        ranks: list[RankPlan] = []
        slowest: dict[tuple[str, int], float] = {}  # maximum FLOPs, by kind of action and stage
        parameters = trainable = 0
        model_flops = 0.0
        for pp_rank, table in enumerate(tables):
            alike: dict[tuple, RankPlan] = {}
            for tp_rank in range(layout.tp):
                model = self.build(place_in(layout, pp_rank, tp_rank), run.train_only)
                counted, trained = counted_parameters(model)
                parameters, trainable = parameters + counted, trainable + trained
                costs = self.costs(model, run, table)
                for stage, of_stage in zip(model.stages, costs, strict=True):
                    for kind, cost in of_stage.items():
                        key = kind, stage.index
                        slowest[key] = max(cost.flops, slowest.get(key, 0))
                key = tuple(stage_keys(model))
                if key not in alike:
                    alike[key] = self.rank_plan(model, run, table, costs)
                alike[key].tp.append(tp_rank)
            ranks += alike.values()
            # Work that is replicated along tp and cp counts once as useful.
            model = self.build(place_in(uncut, pp_rank), run.train_only)
            useful = self.costs(model, without_recompute, table)
            model_flops += sum(cost.flops for stage in useful for cost in stage.values())
        bubble, _ = bubble_and_time(tables, None)
        bubble_of_stages, step_flops = bubble_and_time(tables, slowest)
        return Plan(
            model=family_of(self.config),
            parameters=parameters,
            trainable_parameters=trainable,
            adapter_parameters=parameters - self.of_model if self.attached else 0,
            layout=_described(layout, run),
            batch={name: getattr(run, name) for name in BATCH},
            microbatches=run.microbatches(layout.dp),
            bubble=bubble,
            bubble_of_stages=bubble_of_stages,
            step_flops=step_flops,
            model_flops_per_token=model_flops / (run.micro_batch_size * run.seq_length),
            ranks=ranks,
        )

    def costs(self, model: Model, run: PlannedRun, table: list[Action]) -> list[dict[str, Cost]]:
        """Return the costs of the actions in `table`, for each stage of a rank, by kind."""
        ctx = model.ctx
        split = splits_backward(ctx.layout.schedule, ctx.pp_size, ctx.virtual_size)
        setting = (
            ctx.tp_size,
            ctx.cp_size,
            ctx.layout.cp_method,
            ctx.layout.folded_sizes,
            ctx.sequence_parallel,
            split,
            run.micro_batch_size,
            run.seq_length,
            run.dtype,
            has_one_microbatch(table) and not ctx.layout.reduces_often,
            backward_follows(table, ctx.stage_count - 1),
            run.recompute,
            run.recompute == "full" and run.recompute_interval,
        )
        keys = [(*setting, key) for key in stage_keys(model)]
        new = {key: number for number, key in enumerate(keys) if key not in self._costs}
        if new:
            # Replicas change nothing here, except axes that shard their parameters.
            layout = ctx.layout if ctx.folded else ctx.layout.with_replicas(1)
            alone = place_in(layout, ctx.pp_rank, ctx.tp_rank)
            metered = self.build(alone, run.train_only, getattr(torch, run.dtype))
            metered.recompute(run.recompute, run.recompute_interval)
            buckets = metered.engine.gradients.buckets  # they define the precision of gradients
            queue = WeightQueue(buckets.received) if split else None
            with metered.engine.gradients.deferred(queue):
                for key, number in new.items():
                    how = metered, metered.stages[number], run, queue, table
                    if self.quick:
                        *rest, layers = key[-1]
                        few = (*key[:-1], *rest, *layers[:1])
                        self._costs[key] = estimate_costs(*how, self._few_layers, few)
                    else:
                        self._costs[key] = costs_of(*how)
        return [self._costs[key] for key in keys]

    def rank_plan(
        self,
        model: Model,
        run: PlannedRun,
        table: list[Action],
        costs: list[dict[str, Cost]],
    ) -> RankPlan:
        """Return the requirements of a rank that runs `table`, with an empty `tp`.

        model: of the rank, or of an equal pipeline rank. costs: of the actions of its stages, by
        kind.
        """
        ctx, static = model.ctx, self.static(model, run)
        pp_rank = ctx.placement.rank_of(table[0].stage)
        by_stage = dict(zip(ctx.placement.stages_of(pp_rank), costs, strict=True))
        taken = [by_stage[action.stage][action.kind] for action in table]
        boundary = boundary_bytes(run, model) if ctx.pp_size > 1 else 0
        on_their_way = (MAX_OPEN_EXCHANGES + 1) * boundary
        activations = round(_peak(table, by_stage)) + on_their_way
        if has_one_microbatch(table) and not ctx.layout.reduces_often:
            activations -= static.gradients  # they are included in the costs of the actions
        activations += static.leaving + static.gathered
        forwards = sum(action.kind == "F" for action in table) / len(model.stages)
        backwards = sum(action.kind == "B" for action in table)
        to = [a.stage + (1 if a.kind == "F" else -1) for a in table if a.kind != "W"]
        sends = sum(0 <= stage < ctx.stage_count and stage not in by_stage for stage in to)
        return RankPlan(
            pp=pp_rank,
            tp=[],
            layers=sum(len(stage.layers) for stage in model.stages),
            parameters=static.parameters,
            trainable_parameters=static.trainable_parameters,
            weights=static.weights,
            gradients=static.gradients,
            optimizer=static.optimizer,
            optimizer_host=static.optimizer_host,
            activations=activations,
            total=activations + static.device_bytes,
            in_flight=in_flight(table),
            flops=sum(cost.flops for cost in taken) + static.optimizer_flops,
            sent_tp=sum(cost.sent_tp for cost in taken) + static.sent_tp,
            sent_pp=sends * boundary + static.sent_tied,
            sent_cp=sum(cost.sent_cp for cost in taken),
            sent_dp=static.sent_dp
            + (backwards - 1) * static.sent_each
            + forwards * static.sent_gathers,
        )

    def static(self, model: Model, run: PlannedRun) -> Static:
        """Return the permanent memory of a rank, and the bytes that it sends after the last
        backward."""
        key = (
            model.ctx.tp_size,
            model.ctx.sequence_parallel,
            model.ctx.token_axis.size,
            model.ctx.layout.folded_sizes,
            run.optimizer,
            model.ctx.layout.zero,
            model.ctx.layout.reduces_often,
            run.offload_optimizer,
            run.dtype,
            tuple(model.tied.values()),
            *stage_keys(model),
        )
        if key not in self._static:
            metered = self.build(model.ctx, run.train_only, getattr(torch, run.dtype))
            self._static[key] = measure_static(metered, run)
        return self._static[key]


def schedule_tables(layout: Layout, run: PlannedRun) -> list[list[Action]]:
    """Return the actions of each pipeline rank in a step, in order."""
    schedule, count = schedule_named(layout.schedule), run.microbatches(layout.dp)
    return tables_of(schedule, layout.pp, layout.virtual_pp, count)


def _described(layout: Layout, run: PlannedRun) -> dict:
    """Return the layout as it appears in a plan, by the names of the flags."""
    cuts = layout.stage_layers
    values = {f.name: getattr(layout, f.name) for f in fields(layout)}
    del values["ep"], values["folded"]
    return {
        **values,
        "stage_layers": cuts if isinstance(cuts, str) else ",".join(map(str, cuts)),
        "offload_optimizer": run.offload_optimizer,
        **({"folded": dict(layout.folded_sizes)} if layout.folded_sizes else {}),
    }


def _peak(table: list[Action], costs: dict[int, dict[str, Cost]]) -> float:
    """Return the maximum live bytes of all micro-batches on a rank.

    costs: by stage, then by kind of action.
    """
    held: dict[tuple[int, int], float] = {}  # by stage and micro-batch
    total = peak = 0.0
    for action in table:
        key = action[1:]
        cost, own = costs[action.stage][action.kind], held.get(key, 0.0)
        peak = max(peak, total - own + cost.peak)
        held[key] = cost.held
        total += cost.held - own
    return peak


def bubble_and_time(tables: Sequence[list[Action]], cost: dict | None) -> tuple[float, float]:
    """Return the idle time of all ranks divided by their working time, and the time of a step.

    cost: time of an action, by kind and stage; None: all stages take equal time.
    """
    spans = timeline(tables, cost).values()
    work, end = sum(span.end - span.start for span in spans), max(span.end for span in spans)
    return len(tables) * end / work - 1, end


def note_on_mfu(config: Any, seq_length: int) -> str | None:
    """Return a note if MFU counts other FLOPs than a custom model runs, otherwise None.

    A backward is counted as twice the FLOPs of its forward, which is run on the meta device.
    """
    ctx = ParallelContext(device=META)
    model = FAMILIES[family_of(config)].empty(config, ctx)
    runs = 3 * forward_flops(model, 1, seq_length) / seq_length
    counted = flops_per_token(config, seq_length)
    if abs(counted / runs - 1) < 0.01:
        return None
    return (
        f"note: MFU counts {counted:.4g} FLOPs per token, but the modules run "
        f"{runs:.4g}: docs/new_model.md describes their attributes score_features and "
        "multiplied"
    )
