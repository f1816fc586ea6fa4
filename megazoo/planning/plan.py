"""Tell what a run needs, rank by rank, before it runs: memory, FLOPs, traffic, and the pipeline's
bubble.

The numbers come from the program's own code, not from formulas: each kind of rank is built in a
virtual context and runs one micro-batch, forward and backward, on the meta device, under a meter
(see meter.py); the schedule's table says how often and in what order. What no tensor shows is not
counted: the CUDA context, communication buffers and the allocator's waste, some GB a rank.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

import torch

from megazoo.cli.options import Options, ParallelOptions, TrainingOptions, default_dtype
from megazoo.cli.rules import check_run, check_values
from megazoo.engine.pipeline import MAX_OPEN_EXCHANGES
from megazoo.errors import UserError
from megazoo.models.adapters import LoRASettings
from megazoo.models.base import Model
from megazoo.models.counts import flops_per_token
from megazoo.models.registry import FAMILIES, family_of
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.deferred import WeightQueue
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
    boundary_bytes,
    costs_of,
    estimate_costs,
    forward_flops,
    has_one_microbatch,
)
from megazoo.planning.ranks import Builder, counted_parameters, stage_keys
from megazoo.planning.static import Static, measure_static

MOST_ACTIONS = 1_000_000  # of a step: each is scheduled by itself
# What a plan repeats of the options it was made for.
LAYOUT_OPTIONS = (
    "tp pp virtual_pp cp cp_method stage_layers sequence_parallel schedule zero offload_optimizer"
).split()
BATCH_OPTIONS = (
    "micro_batch_size global_batch_size seq_length dtype recompute recompute_interval"
).split()


@dataclass
class RankPlan:
    """What a rank takes, and all that are like it: the ranks `tp` of pipeline rank `pp`, in each
    replica, and all along cp.

    Bytes on the device: weights, gradients, optimizer (its state), activations, and total, the peak
    of a step. activations are what the others leave of the total: in a step of one micro-batch
    gradients come while activations go. optimizer_host: bytes of optimizer state on the CPU.
    trainable_parameters: those of the rank's parameters that are not frozen, which alone have
    gradients and optimizer state.
    in_flight: the most micro-batches whose activations are held at once. Of a step: flops, with
    what is recomputed, and the bytes that the rank sends over tp, pp and cp, and over dp and cp
    together for gradients and parameters, sent_dp.
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
    """What a run takes.

    parameters: of the whole model, copies once, with its adapters. trainable_parameters: those of
    them that are not frozen. microbatches: of a replica, in a step. bubble: idle time over work, of
    all ranks, if all stages are alike. bubble_of_stages: the same if each action takes as long as
    its FLOPs. step_flops: the FLOPs that a rank could do in the time of such a step.
    model_flops_per_token: of forward and backward, nothing twice: what MFU counts.
    """

    model: str
    parameters: int
    trainable_parameters: int
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
    """Plans runs of a model. What it has metered of a kind of rank it uses again, in other layouts,
    too.

    quick: meter a few layers of each stage only (see estimate_costs). lora: the model's adapters;
    None: it has none. optimizer: as --optimizer. What of it is trained the runs' TrainingOptions
    say (train_only).
    """

    def __init__(
        self,
        config,
        quick: bool = False,
        lora: LoRASettings | None = None,
        optimizer: str = "adamw",
    ):
        super().__init__(config, lora)
        self.quick, self.optimizer = quick, optimizer
        self._costs: dict[tuple, dict[str, Cost]] = {}  # of a kind of stage
        self._few_layers: dict[tuple, dict[str, Cost]] = {}  # the same, as if it had but these
        self._static: dict[tuple, Static] = {}  # of a kind of rank

    def check(self, parallel: ParallelOptions, training: TrainingOptions, dp: int) -> None:
        """Raise UserError if pretrain_gpt.py would refuse the run, or dp can't be."""
        self.trained(training.train_only)  # which refuses names that nothing has
        # The model that check_run makes has no adapters, which a pattern may be of.
        options = Options(parallel=parallel, training=replace(training, train_only=None))
        options.data.data, options.optimizer.min_lr = ("mock",), 0.0  # data play no part
        options.optimizer.optimizer = self.optimizer
        check_values(options)
        if dp < 1:
            raise UserError(f"dp {dp} must be at least 1")
        microbatches = training.global_batch_size // (training.micro_batch_size * dp)
        stages = parallel.pp * parallel.virtual_pp
        if 2 * stages * microbatches > MOST_ACTIONS:  # a forward and a backward
            raise UserError(
                f"{microbatches} micro-batches a step are more than can be planned"
                + (f" with {stages} stages" if stages > 1 else "")
            )
        check_run(options, self.family, self.config, SimpleNamespace(vocab_size=0), dp)
        if parallel.cp > 1:
            self.build(parallel, dp, 0, 0)  # which refuses more ranks than heads

    def plan(self, parallel: ParallelOptions, training: TrainingOptions, dp: int = 1) -> Plan:
        """Return the plan of a run that `check` allows."""
        training = replace(training, dtype=training.dtype or default_dtype("cpu"))
        tables = schedule_tables(parallel, training, dp)
        without_recompute = replace(training, recompute="none")
        uncut = replace(parallel, tp=1, cp=1, sequence_parallel=False)
        ranks: list[RankPlan] = []
        slowest: dict[tuple[str, int], float] = {}  # the most FLOPs of an action of a stage
        parameters = trainable = 0
        model_flops = 0.0
        for pp_rank, table in enumerate(tables):
            alike: dict[tuple, RankPlan] = {}
            for tp_rank in range(parallel.tp):
                model = self.build(parallel, dp, pp_rank, tp_rank, training.train_only)
                counted, trained = counted_parameters(model)
                parameters, trainable = parameters + counted, trainable + trained
                costs = self.costs(model, parallel, training, table)
                for stage, of_stage in zip(model.stages, costs, strict=True):
                    for kind, cost in of_stage.items():
                        key = kind, stage.index
                        slowest[key] = max(cost.flops, slowest.get(key, 0))
                key = tuple(stage_keys(model))
                if key not in alike:
                    alike[key] = self.rank_plan(model, parallel, training, table, costs)
                alike[key].tp.append(tp_rank)
            ranks += alike.values()
            # What ranks along tp and cp do each for themselves is useful once.
            model = self.build(uncut, 1, pp_rank, 0, training.train_only)
            useful = self.costs(model, uncut, without_recompute, table)
            model_flops += sum(cost.flops for stage in useful for cost in stage.values())
        bubble, _ = bubble_and_time(tables, None)
        bubble_of_stages, step_flops = bubble_and_time(tables, slowest)
        return Plan(
            model=family_of(self.config),
            parameters=parameters,
            trainable_parameters=trainable,
            layout={name: getattr(parallel, name) for name in LAYOUT_OPTIONS} | {"dp": dp},
            batch={name: getattr(training, name) for name in BATCH_OPTIONS},
            microbatches=microbatches_of(training, dp),
            bubble=bubble,
            bubble_of_stages=bubble_of_stages,
            step_flops=step_flops,
            model_flops_per_token=model_flops / (training.micro_batch_size * training.seq_length),
            ranks=ranks,
        )

    def costs(
        self,
        model: Model,
        parallel: ParallelOptions,
        training: TrainingOptions,
        table: list[Action],
    ) -> list[dict[str, Cost]]:
        """Return what the actions of each stage of a rank take, by their kind, in `table`."""
        split = splits_backward(parallel.schedule, parallel.pp, parallel.virtual_pp)
        setting = (
            parallel.tp,
            parallel.cp,
            parallel.cp_method,
            model.ctx.sequence_parallel,
            split,
            training.micro_batch_size,
            training.seq_length,
            training.dtype,
            has_one_microbatch(table),
            backward_follows(table, model.ctx.stage_count - 1),
            training.recompute,
            training.recompute == "full" and training.recompute_interval,
        )
        keys = [(*setting, key) for key in stage_keys(model)]
        new = {key: number for number, key in enumerate(keys) if key not in self._costs}
        if new:
            # Replicas change nothing here.
            ctx = self.context(parallel, 1, model.ctx.pp_rank, model.ctx.tp_rank)
            dtype = getattr(torch, training.dtype)
            metered = self.build_in(ctx, training.train_only, dtype)
            metered.recompute(training.recompute, training.recompute_interval)
            buckets = metered.engine.buckets  # they say of what precision gradients are
            queue = WeightQueue(buckets.received) if split else None
            with metered.engine.deferred_sums(queue):
                for key, number in new.items():
                    how = metered, metered.stages[number], training, queue, table
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
        parallel: ParallelOptions,
        training: TrainingOptions,
        table: list[Action],
        costs: list[dict[str, Cost]],
    ) -> RankPlan:
        """Return what a rank takes that runs `table`; `tp` is left empty.

        model: the rank's, or that of a pipeline rank that is like it. costs: of the actions of its
        stages, by their kind.
        """
        ctx, static = model.ctx, self.static(model, parallel, training)
        pp_rank = rank_of(table[0].stage, ctx.pp_size)
        by_stage = dict(zip(stages_of(pp_rank, ctx.pp_size, ctx.virtual_size), costs, strict=True))
        taken = [by_stage[action.stage][action.kind] for action in table]
        boundary = boundary_bytes(training, model) if ctx.pp_size > 1 else 0
        on_their_way = (MAX_OPEN_EXCHANGES + 1) * boundary
        activations = round(_peak(table, by_stage)) + on_their_way
        if has_one_microbatch(table):
            activations -= static.gradients  # which the actions have counted
        last = ctx.stage_count - 1
        sends = sum(
            a.stage < last if a.kind == "F" else a.stage > 0 for a in table if a.kind != "W"
        )
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
            sent_dp=static.sent_dp,
        )

    def static(self, model: Model, parallel: ParallelOptions, training: TrainingOptions) -> Static:
        """Return what a rank has all the time, and sends after the last backward."""
        key = (
            parallel.tp,
            model.ctx.sequence_parallel,
            model.ctx.token_axis.size,
            parallel.zero,
            parallel.offload_optimizer,
            training.dtype,
            tuple(model.tied.values()),
            *stage_keys(model),
        )
        if key not in self._static:
            dtype = getattr(torch, training.dtype)
            metered = self.build_in(model.ctx, training.train_only, dtype)
            self._static[key] = measure_static(metered, parallel, self.optimizer)
        return self._static[key]


def microbatches_of(training: TrainingOptions, dp: int) -> int:
    """Return the number of micro-batches of a replica, in a step."""
    return training.global_batch_size // (dp * training.micro_batch_size)


def schedule_tables(
    parallel: ParallelOptions, training: TrainingOptions, dp: int
) -> list[list[Action]]:
    """Return what each pipeline rank does in a step, in order."""
    schedule, count = schedule_named(parallel.schedule), microbatches_of(training, dp)
    return tables_of(schedule, parallel.pp, parallel.virtual_pp, count)


def _peak(table: list[Action], costs: dict[int, dict[str, Cost]]) -> float:
    """Return the most bytes that live on a rank at once, of all its micro-batches.

    costs: of each stage, by the kind of action.
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
    """Return the idle time of all ranks over their work, and the time of a step.

    cost: the time of an action, by its kind and stage; of None, all stages are alike.
    """
    spans = timeline(tables, cost).values()
    work, end = sum(span.end - span.start for span in spans), max(span.end for span in spans)
    return len(tables) * end / work - 1, end


def note_on_mfu(config, seq_length: int) -> str | None:
    """Say, of a model of a user's own, that MFU counts other FLOPs than run; None if it doesn't.

    A backward takes twice the FLOPs of its forward, which is run on the meta device.
    """
    ctx = ParallelContext(device=META)
    model = FAMILIES[family_of(config)].empty(config, ctx)
    runs = 3 * forward_flops(model, 1, seq_length) / seq_length
    counted = flops_per_token(config, seq_length)
    if abs(counted / runs - 1) < 0.01:
        return None
    return (
        f"note: MFU counts {counted:.4g} FLOPs a token where {runs:.4g} run: "
        "docs/new_model.md says how a module tells its score_features and multiplied"
    )
