"""What a run would need, rank by rank, before it runs: memory, FLOPs, traffic, and the pipeline's bubble.

The numbers come from the program's own code, not from formulas: each kind of rank is built in a virtual context and
runs one micro-batch, forward and backward, on the meta device, under a meter; the schedule's table says how often and
in what order. Attention and dropout are metered as the kernels of GPUs run them: without keeping the scores, and with
masks of a byte an element. What no tensor shows is not counted: the CUDA context, communication buffers and the
allocator's waste, some GB a rank.
"""

import math
import re
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megazoo.config import Options, ParallelOptions, TrainingOptions, check_run, check_values, parse_stage_layers
from megazoo.errors import UserError
from megazoo.models import FAMILIES, Model, family_of
from megazoo.optim import MOMENTS, AdamW
from megazoo.parallel.context import ParallelContext, Stage
from megazoo.parallel.linear import WeightQueue
from megazoo.parallel.pipeline import MAX_OPEN_EXCHANGES, MicroBatch
from megazoo.parallel.recompute import MODES
from megazoo.parallel.schedule import SCHEDULES, Action, backward_follows, in_flight, timeline
from megazoo.parallel.shard import sum_over_copies
from megazoo.precision import LossScale

META = torch.device("meta")
LARGEST_TP = 8  # in a search: tensor-parallel ranks that share a node
LARGEST_VIRTUAL = 4  # in a search
# In a search: FLOPs in the time of one byte sent, of an H100 at 500 TFLOP/s with 450 GB/s in a node, 50 GB/s outside.
FLOPS_A_BYTE = {"tp": 1_000, "pp": 10_000, "dp": 10_000}

aten = torch.ops.aten
_flash, _flash_backward = (
    getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{end}") for end in ("", "_backward")
)


# What one action of the schedule takes.


@dataclass(frozen=True)
class Cost:
    """Of an action of one micro-batch on one rank. sent: bytes over tp. peak: the most bytes of this micro-batch that
    live during the action, held: those that live on after it."""

    flops: float
    sent: float
    peak: float
    held: float


class Meter(TorchDispatchMode):
    """Counts, of what runs on the meta device within `with meter:`, FLOPs, and bytes of the tensors that live.

    FLOPs are those of matrix products, two for a multiply-add. live, peak: bytes of all tensors that were made within,
    now and at most since `take`, each storage once.
    """

    def __init__(self, group):
        super().__init__()
        self.flops = self.live = self.peak = 0
        self._group, self._sent = group, group.sent if group else 0.0
        self._storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        packet = function._overloadpacket
        if packet is _flash:
            self.flops += _attention_flops(*arguments[:3])
        elif packet is _flash_backward:  # the scores, which the kernel computes again, not counted
            self.flops += 2 * _attention_flops(*arguments[1:4])
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*arguments, **(options or {}), out_val=result)
        results = result if isinstance(result, tuple | list) else (result,)
        for tensor, returned in zip(results, function._schema.returns, strict=False):
            if isinstance(tensor, torch.Tensor) and returned.alias_info is None:
                self._made(tensor.untyped_storage())
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def freed(_) -> None:
            del self._storages[key]
            self.live -= size

        self._storages[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)

    def take(self) -> Cost:
        """The cost of what ran since the last call."""
        sent = self._group.sent if self._group else 0.0
        cost = Cost(self.flops, sent - self._sent, self.peak, self.live)
        self.flops, self._sent, self.peak = 0, sent, self.live
        return cost


def _attention_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Of all scores, as is usual, though a causal mask leaves half of them out."""
    return 2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])


class _KernelsOfDevices(TorchFunctionMode):
    """On meta torch would choose the attention that keeps its scores, and masks of dropout as wide as x."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        if function is F.scaled_dot_product_attention:
            q, k, v, *more = arguments
            options = dict(zip(("attn_mask", "dropout_p", "is_causal"), more, strict=False)) | options
            options.pop("enable_gqa", None)
            return _flash(q, k, v, **options)[0]
        if function is F.dropout:
            return torch.native_dropout(*arguments, options["p"], train=True)[0]
        return function(*arguments, **options)


def _costs(
    model: Model, stage: Stage, training: TrainingOptions, queue: WeightQueue | None, table: list[Action]
) -> dict[str, Cost]:
    """What each kind of action of a stage takes: what `run_pipeline` does, with one micro-batch of `table`, on meta.

    If it is the only one of a step, the gradients come while the activations go, and count as live.
    """
    for parameter in model.parameters():
        parameter.grad = None if _is_alone(table) else torch.empty(parameter.shape, dtype=torch.float32, device=META)
    tokens = (training.micro_batch_size, _padded(training.seq_length, model.ctx))
    ids = torch.empty(tokens, dtype=torch.int64, device=META)
    batch = MicroBatch(tokens, ids, ids, length=training.seq_length, longest=training.seq_length)
    shape = boundary_shape(training, model)
    meter, costs = Meter(model.ctx.tp_group), {}
    with _KernelsOfDevices(), meter:
        received = None if stage.first else torch.empty(shape, dtype=model.dtype, device=META, requires_grad=True)
        output = model.forward_stage(batch.input_ids if stage.first else received, batch, stage)
        if stage.last:
            labelled = torch.ones((), device=META)
            at_once = backward_follows(table, stage.index)
            output = model.loss_of(output, batch, 1.0 / labelled if at_once else None) / labelled
    if not stage.last:  # sent: its graph remains
        output.data = torch.empty(1, dtype=output.dtype, device=META)
    costs["F"] = meter.take()
    with _KernelsOfDevices(), meter:
        gradient = torch.full_like(output, 1.0) if stage.last else torch.empty(shape, dtype=model.dtype, device=META)
        torch.autograd.Variable._execution_engine.run_backward(
            (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
        weights = queue.take() if queue else None
    del received, output, gradient
    costs["I" if queue else "B"] = meter.take()
    if weights:
        with meter:
            weights()
        del weights
        costs["W"] = meter.take()
    return costs


def _costs_of_alike(
    model: Model, stage: Stage, training: TrainingOptions, queue: WeightQueue | None, table: list[Action]
) -> dict[str, Cost]:
    """As _costs, but of many layers only a few are run, and the others taken to be like them.

    The peak is then exact or, where something after the layers' backward needs more than they, above what it is.
    """
    unit = training.recompute_interval if training.recompute == "full" else 1
    rest = len(stage.layers) % unit
    if len(stage.layers) <= 2 * unit + rest:
        return _costs(model, stage, training, queue, table)
    one, two = (
        _costs(model, replace(stage, layers=stage.layers[: count * unit + rest]), training, queue, table)
        for count in (1, 2)
    )
    more, costs, before = len(stage.layers) // unit - 2, {}, "F"  # before: the action after which this one comes
    for kind in two:
        a, b = one[kind], two[kind]
        costs[kind] = Cost(
            b.flops + more * (b.flops - a.flops),
            b.sent + more * (b.sent - a.sent),
            b.peak + more * max(two[each].held - one[each].held for each in (before, kind)),
            b.held + more * (b.held - a.held),
        )
        before = kind
    return costs


def _is_alone(table: list[Action]) -> bool:
    """Whether the micro-batch of a table is the only one."""
    return all(action.microbatch == 0 for action in table)


def boundary_shape(training: TrainingOptions, model: Model) -> tuple[int, int, int]:
    """Of what a stage sends to another."""
    ctx = model.ctx
    sequence = _padded(training.seq_length, ctx) // (ctx.tp_size if ctx.sequence_parallel else 1)
    return training.micro_batch_size, sequence, model.hidden_size


def _padded(sequence: int, ctx: ParallelContext) -> int:
    return sequence + (-sequence % ctx.tp_size if ctx.sequence_parallel else 0)


# What a rank takes.


@dataclass
class RankPlan:
    """Of one rank, and of all that are like it: the ranks `tp` of pipeline rank `pp`, in each replica.

    Bytes on the device: weights, gradients, optimizer, total, and activations: the rest of the total, which is the peak
    (in a step of one micro-batch gradients come while activations go). optimizer_host: bytes on the CPU.
    in_flight: micro-batches whose activations are held at once. Of a step: flops, with what is recomputed, and the
    bytes that the rank sends over tp, pp and dp.
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
    """Of a run. parameters: of the whole model. microbatches: of a replica. bubble: idle time over work, of all ranks,
    if all stages are alike; bubble_of_stages: if each action takes as long as its FLOPs; step_flops: the FLOPs of a
    rank in the time that a step then takes, idle time included. model_flops_per_token: forward and backward, nothing
    twice: what MFU counts.
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
class Layout:
    """What a search has found. Of a step, of the rank that has most: total bytes of memory, and bytes sent over tp, pp
    and dp. bubble, step_flops: as bubble_of_stages and step_flops in Plan. time: step_flops, and as many more for each
    byte as FLOPS_A_BYTE says: what layouts are ranked by."""

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
    """Plans runs of a model. What it has metered of a kind of rank it uses again, in other layouts, too.

    quick: meter a few layers of each stage only (see _costs_of_alike).
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
        tables = [SCHEDULES[p.schedule](rank, p.pp, p.virtual_pp, microbatches) for rank in range(p.pp)]
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
                        slowest[kind, stage.index] = max(cost.flops, slowest.get((kind, stage.index), 0))
                if (key := tuple(_keys(model))) not in alike:
                    alike[key] = self.rank_plan(model, p, t, tables[pp_rank], costs)
                alike[key].tp.append(tp_rank)
            ranks += alike.values()
        alike_bubble, _ = _bubble(tables, None)
        bubble, step_flops = _bubble(tables, slowest)
        tokens = t.micro_batch_size * t.seq_length
        names = ("tp", "pp", "virtual_pp", "stage_layers", "sequence_parallel", "schedule", "zero", "offload_optimizer")
        layout = {name: getattr(p, name) for name in names} | {"dp": dp}
        names = ("micro_batch_size", "global_batch_size", "seq_length", "dtype", "recompute", "recompute_interval")
        batch = {name: getattr(t, name) for name in names}
        return Plan(
            family_of(self.config), counted, layout, batch, microbatches, alike_bubble, bubble, step_flops,
            model_flops / tokens, ranks,
        )  # fmt: skip

    def search(
        self, gpus: int, memory: int, parallel: ParallelOptions, training: TrainingOptions
    ) -> Iterator["Layout"]:
        """The layouts of `gpus` ranks of which each fits into `memory` bytes, in no order.

        Searched are tp (a power of two, at most LARGEST_TP), pp (no deeper than what fits without recomputation), dp,
        virtual-pp (at most LARGEST_VIRTUAL, where it divides the layers), and recompute: the least that fits. Sequence
        parallelism and ZeRO-1 send no more than what they replace, so that they are on where tp and dp are above 1. The
        rest is as given. Of the tp ranks the first is looked at: if one has more, it does.
        """
        if gpus < 1:
            raise UserError(f"gpus {gpus} must be at least 1")
        one = replace(training, global_batch_size=training.micro_batch_size)
        self.check(replace(parallel, tp=1, pp=1, virtual_pp=1, stage_layers="balanced"), one, 1)
        for tp in (1 << n for n in range(LARGEST_TP.bit_length())):
            for pp in (n for n in range(1, min(gpus, self.config.layers) + 1) if gpus % (tp * n) == 0):
                dp, enough = gpus // (tp * pp), False
                deep = [v for v in range(2, LARGEST_VIRTUAL + 1) if self.config.layers % (pp * v) == 0]
                for virtual in [1, *(deep if pp > 1 and parallel.schedule != "zb-h1" else ())]:
                    how = {"tp": tp, "pp": pp, "virtual_pp": virtual, "sequence_parallel": tp > 1, "zero": int(dp > 1)}
                    layout = replace(parallel, **how, stage_layers="balanced")
                    try:
                        self.check(layout, training, dp)
                    except UserError:
                        continue
                    for recompute in MODES:
                        if found := self._fitting(layout, replace(training, recompute=recompute), dp, memory):
                            yield found
                            enough |= recompute == "none"
                            break
                if enough:
                    break

    def _fitting(self, parallel: ParallelOptions, training: TrainingOptions, dp: int, memory: int) -> "Layout | None":
        """The layout, if each rank fits."""
        p, t = parallel, training
        microbatches = t.global_batch_size // (dp * t.micro_batch_size)
        models: dict[tuple, Model] = {}
        ranks, flops, tables = [], {}, []
        for pp_rank in range(p.pp):
            stages = self.family.all_stages(self.config, self.context(p, dp, pp_rank, 0))[pp_rank :: p.pp]
            alike = tuple((stage.first, stage.last, len(stage.layers)) for stage in stages)
            if alike not in models:
                models[alike] = self.build(p, dp, pp_rank, 0)
                if self.static(models[alike], p, t).device_bytes > memory:
                    return None
            tables.append(SCHEDULES[p.schedule](pp_rank, p.pp, p.virtual_pp, microbatches))
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
        return Layout(
            p.tp, p.pp, dp, p.virtual_pp, t.recompute, p.sequence_parallel, p.zero, microbatches,
            max(rank.total for rank in ranks), bubble, sent["tp"], sent["pp"], sent["dp"], step_flops, time,
        )  # fmt: skip

    def context(self, parallel: ParallelOptions, dp: int, pp_rank: int, tp_rank: int) -> ParallelContext:
        """The virtual context of a rank, on meta."""
        p = parallel
        ctx = ParallelContext.virtual(
            p.tp, p.pp, dp, rank=pp_rank * dp * p.tp + tp_rank, sequence_parallel=p.sequence_parallel,
            virtual=p.virtual_pp, stage_layers=parse_stage_layers(p.stage_layers),
        )  # fmt: skip
        return replace(ctx, device=META)

    def build(self, parallel: ParallelOptions, dp: int, pp_rank: int, tp_rank: int) -> Model:
        """A rank's stages, without memory."""
        return self.family.on_meta(self.config, self.context(parallel, dp, pp_rank, tp_rank))

    def costs(
        self, model: Model, parallel: ParallelOptions, training: TrainingOptions, table: list[Action]
    ) -> list[dict[str, Cost]]:
        """What the actions of each stage of a rank take that runs `table`."""
        t, later = training, parallel.schedule == "zb-h1"
        how = (parallel.tp, model.ctx.sequence_parallel, later, t.micro_batch_size, t.seq_length, t.dtype)
        how += (_is_alone(table), backward_follows(table, model.ctx.stage_count - 1))
        how += (t.recompute, t.recompute == "full" and t.recompute_interval)
        keys = [(*how, key) for key in _keys(model)]
        if new := [number for number, key in enumerate(keys) if key not in self._known]:
            # Replicas change nothing here, and without them the buckets sum nothing.
            ctx = replace(model.ctx, dp_size=1, dp_rank=0)
            low = self.family.empty(self.config, ctx, dtype=getattr(torch, t.dtype))
            low.recompute(t.recompute, t.recompute_interval)
            buckets = low.gradient_buckets  # they say of what precision gradients are
            queue = WeightQueue(buckets.received) if later else None
            with low._gradients_later(queue):
                for number in new:
                    if keys[number] not in self._known:
                        of_stage = _costs_of_alike if self.quick else _costs
                        self._known[keys[number]] = of_stage(low, low.stages[number], t, queue, table)
        return [self._known[key] for key in keys]

    def rank_plan(
        self, model: Model, parallel: ParallelOptions, training: TrainingOptions, table: list[Action], costs: list
    ) -> RankPlan:
        """What a rank takes that runs `table`; `tp` is left empty. costs: of its stages' actions."""
        ctx, static = model.ctx, self.static(model, parallel, training)
        pp_rank = table[0].stage % ctx.pp_size  # of the model's or of one that is like it
        by_stage = dict(zip(range(pp_rank, ctx.stage_count, ctx.pp_size), costs, strict=True))
        itemsize = getattr(torch, training.dtype).itemsize
        boundary = math.prod(boundary_shape(training, model)) * itemsize if ctx.pp_size > 1 else 0
        activations = round(_peak(table, by_stage)) + (MAX_OPEN_EXCHANGES + 1) * boundary  # that are on their way
        if _is_alone(table):
            activations -= static.gradients  # that the actions have counted
        last = ctx.stage_count - 1
        sends = sum(a.stage < last if a.kind == "F" else a.stage > 0 for a in table if a.kind != "W")
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

    def static(self, model: Model, parallel: ParallelOptions, training: TrainingOptions) -> "Static":
        """What a rank has all the time, and what it sends after the last backward."""
        dp, tied = model.ctx.dp_size, tuple(model.tied.values())
        how = (parallel.tp, model.ctx.sequence_parallel, dp, parallel.zero, parallel.offload_optimizer, training.dtype)
        key = (*how, tied, *_keys(model))
        if key not in self._known:
            low = self.family.empty(self.config, model.ctx, dtype=getattr(torch, training.dtype))
            self._known[key] = _static(low, parallel)
        return self._known[key]


@dataclass(frozen=True)
class Static:
    """Bytes that a rank has all the time, as in RankPlan, and those that it sends after the last backward."""

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
    sum_over_copies([(e.parameter.grad, e.spec) for e in entries if e.spec.has_partial_gradient(ctx)], ctx)
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
    """Of each stage, equal for those that do alike: as many layers, of the same shapes, though of other numbers.

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
        keys.append((stage.first, stage.last, outside, tuple(tuple(layers[i]) for i in stage.layers)))
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
