"""Measure each action of a schedule on a rank: FLOPs, bytes sent and live bytes. The action runs on
the meta device, under a meter.

Attention and dropout are measured as GPU kernels run them: attention stores no scores, and dropout
stores a mask of one byte per element.
"""

import math
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.stage import StageRun, activation_shape
from megazoo.engine.transport import MetaTransport
from megazoo.models.base import Model
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.deferred import WeightQueue
from megazoo.parallel.groups import VirtualGroup
from megazoo.parallel.schedule import Action, backward_follows
from megazoo.parallel.sequence import SequenceCut, padded_length
from megazoo.parallel.stages import Stage
from megazoo.planning.run import PlannedRun
from megazoo.torch_internals import (
    TorchDispatchMode,
    flash_attention_operators,
    flop_formulas,
    results_are_new,
    storage_key,
    tensors_in,
    writes_memory,
)

META = torch.device("meta")

_flash, _flash_backward = flash_attention_operators()


@dataclass(frozen=True)
class Cost:
    """The cost of an action for one micro-batch on one rank.

    flops: of matrix products. moved: bytes that all other kernels read and write. kernels: number
    of both kinds of kernels. collectives: number of calls over tp and cp. sent_tp, sent_cp: bytes
    sent over these axes; sent_cp includes axes that are folded into dp x cp. sent_beside: part of
    sent_tp that overlaps with matrix products. peak: maximum live bytes of this micro-batch during
    the action. held: live bytes after the action.
    """

    flops: float
    moved: float
    kernels: int
    collectives: int
    sent_tp: float
    sent_beside: float
    sent_cp: float
    peak: float
    held: float


class Meter(TorchDispatchMode):
    """Count FLOPs, bytes read and written, and live bytes of operators on the meta device within
    `with meter:`.

    flops: of matrix products, two per multiply-add. moved: bytes that all other operators read and
    write, each as a separate kernel, without fusion. live: bytes of existing tensors that were made
    within the block; each storage is counted once. peak: maximum of live since the last `take`.
    ctx: the virtual context of the model. keys: number of keys that attention counts per token; by
    default its actual keys.
    """

    def __init__(self, ctx: ParallelContext, keys: int | None = None):
        super().__init__()
        self.flops = self.moved = self.kernels = self.live = self.peak = 0
        groups = [ctx.tp_group, ctx.cp_group, *(axis.group for axis in ctx.folded.values())]
        alone = VirtualGroup(1, 0)  # nothing is sent over it
        self._groups = [each if isinstance(each, VirtualGroup) else alone for each in groups]
        self._keys = keys
        self._sent = self._sent_so_far()
        self._storages: dict[int, weakref.ref] = {}
        self._formulas = flop_formulas()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        packet = function.overloadpacket
        if packet is _flash:
            self.flops += self._attention_flops(*arguments[:3])
        elif packet is _flash_backward:  # without the scores that the kernel recomputes
            self.flops += 2 * self._attention_flops(*arguments[1:4])
        elif packet in self._formulas:
            self.flops += self._formulas[packet](*arguments, **(options or {}), out_val=result)
        results = result if isinstance(result, tuple | list) else (result,)
        if writes_memory(function):
            self.kernels += 1
            if packet not in self._formulas:
                self.moved += sum(t.nbytes for t in tensors_in(arguments, options, results))
        for tensor, is_new in zip(results, results_are_new(function), strict=False):
            if isinstance(tensor, torch.Tensor) and is_new:
                self._made(tensor.untyped_storage())
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        key, size = storage_key(storage), storage.nbytes()
        if key in self._storages:
            return

        def freed(_) -> None:
            del self._storages[key]
            self.live -= size

        self._storages[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)

    def take(self) -> Cost:
        """Return the cost of what ran since the last call."""
        sent = self._sent_so_far()
        calls, *sent_now = (now - before for now, before in zip(sent, self._sent, strict=True))
        tp, beside, others = sent_now
        cost = Cost(
            self.flops,
            self.moved,
            self.kernels,
            int(calls),
            tp,
            beside,
            others,
            self.peak,
            self.live,
        )
        self.flops = self.moved = self.kernels = 0
        self._sent, self.peak = sent, self.live
        return cost

    def _sent_so_far(self) -> list[float]:
        """Return, so far, the number of collectives, the bytes sent over tp, the part of them that
        overlaps with products, and the bytes sent over cp and the folded axes."""
        tp, *others = self._groups
        calls = sum(group.calls for group in [tp, *others])
        return [calls, tp.sent, tp.sent_beside, sum(group.sent for group in others)]

    def _attention_flops(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
        """Return the FLOPs of both matrix products of attention.

        All scores are counted, as is usual, although a causal mask removes half of them. Shapes:
        [rows, heads, tokens, features].
        """
        keys = self._keys or k.shape[-2]
        return 2 * q.shape[:-1].numel() * keys * (q.shape[-1] + v.shape[-1])


class DeviceKernels(TorchFunctionMode):
    """Replace attention and dropout by their GPU kernels.

    On the meta device torch would use an attention that stores its scores, and dropout masks in the
    dtype of the input.
    """

    def __torch_function__(self, function, types, arguments: Any = (), options: dict | None = None):
        options = options or {}
        if function is F.scaled_dot_product_attention:
            q, k, v, *more = arguments
            names = ("attn_mask", "dropout_p", "is_causal")
            options = dict(zip(names, more, strict=False)) | options
            options.pop("enable_gqa", None)
            return _flash(q, k, v, **options)[0]
        if function is F.dropout:
            return torch.native_dropout(arguments[0], options["p"], True)[0]
        return function(*arguments, **options)


def costs_of(
    model: Model,
    stage: Stage,
    run: PlannedRun,
    queue: WeightQueue | None,
    table: list[Action],
) -> dict[str, Cost]:
    """Return the cost of each kind of action of a stage.

    The engine runs the stage on one micro-batch of `table`. If a step has only one micro-batch,
    gradients are allocated while activations are freed, and count as live.

    Under context parallelism, attention also counts the keys of the whole sequence for each token,
    although a rank that gathers keys computes only those up to the ends of its chunks. So all ranks
    are equal: each has an early chunk with few keys and a late one with many.
    """
    grow = has_one_microbatch(table) and not model.ctx.layout.reduces_often
    _set_gradients(model, stage, exist=not grow)
    batch = _micro_batch(run, model.ctx)
    stage_run = StageRun(
        model,
        [batch],
        torch.ones((), device=META),
        MetaTransport(model, batch),
        stages=[stage],
        backward_is_next=backward_follows(table, stage.index),
        weight_queue=queue,
    )
    forward = Action("F", stage.index, 0)
    backward = forward._replace(kind="I" if queue else "B")
    meter, costs = Meter(model.ctx, batch.cut.length if batch.cut else None), {}
    with DeviceKernels(), meter:
        stage_run.forward(forward, train=True)
        costs["F"] = meter.take()
        stage_run.backward(backward)
        costs[backward.kind] = meter.take()
    if queue:
        with meter:
            stage_run.weights.pop((stage.index, 0))()
        costs["W"] = meter.take()
    return costs


def _micro_batch(run: PlannedRun, ctx: ParallelContext) -> MicroBatch:
    """Return a rank's part of a micro-batch, on the meta device."""
    length = run.seq_length
    whole = padded_length(length, ctx)
    tokens = (run.micro_batch_size, whole // ctx.cp_size)
    ids = torch.empty(tokens, dtype=torch.int64, device=META)
    cut = SequenceCut.of(whole, ctx)
    return MicroBatch(tokens, ids, ids, length=length, longest=length, cut=cut)


def _set_gradients(model: Model, stage: Stage, exist: bool) -> None:
    """Set the gradients before a micro-batch. exist: every trained parameter has an fp32 gradient
    from earlier micro-batches; otherwise only tied parameters have one, if a later stage of the
    rank made it before `stage`."""
    made = set() if stage.index == model.stages[-1].index else model.used_again
    for entry in model.entries():
        parameter = entry.parameter
        parameter.grad = None
        if parameter.requires_grad and (exist or entry.name in made):
            parameter.grad = torch.empty(parameter.shape, dtype=torch.float32, device=META)


def forward_flops(model: Model, rows: int, sequence: int) -> float:
    """Return the FLOPs of one forward pass, with the loss, of a whole model on the meta device."""
    ids = torch.empty(rows, sequence, dtype=torch.int64, device=META)
    batch = MicroBatch((rows, sequence), ids, ids, length=sequence, longest=sequence)
    meter = Meter(model.ctx)
    stage_run = StageRun(model, [batch], torch.ones((), device=META), MetaTransport(model, batch))
    with DeviceKernels(), meter:
        for stage in model.stages:
            stage_run.forward(Action("F", stage.index, 0), train=False)
    return meter.take().flops


def estimate_costs(
    model: Model,
    stage: Stage,
    run: PlannedRun,
    queue: WeightQueue | None,
    table: list[Action],
    known: dict[tuple, dict[str, Cost]],
    key: tuple,
) -> dict[str, Cost]:
    """Estimate `costs_of` from a run of a few layers. The other layers are assumed to be equal. If
    layers differ in their trained parameters, all layers run.

    known: cache of the measured costs of a few layers, which is extended. key: equal for stages
    with equal costs, apart from the number of layers. The peak is exact, or too high if the
    backward of something outside the layers needs more memory than the layers.
    """
    unit = run.recompute_interval if run.recompute == "full" else 1
    rest = len(stage.layers) % unit
    if len(stage.layers) <= 2 * unit + rest or not _learn_alike(model, stage.layers):
        return costs_of(model, stage, run, queue, table)
    few = [stage.layers[: n * unit + rest] for n in (1, 2)]
    for layers in few:
        if (*key, len(layers)) not in known:
            cut = replace(stage, layers=layers)
            known[*key, len(layers)] = costs_of(model, cut, run, queue, table)
    one, two = (known[*key, len(layers)] for layers in few)
    repeats = len(stage.layers) // unit - 2
    costs, before = {}, "F"  # before: the preceding action
    for kind in two:
        a, b = one[kind], two[kind]
        more_of_each = {
            name: value + repeats * (value - getattr(a, name)) for name, value in vars(b).items()
        }
        peak = b.peak + repeats * max(two[k].held - one[k].held for k in (before, kind))
        costs[kind] = Cost(**more_of_each | {"peak": peak})
        before = kind
    return costs


def _learn_alike(model: Model, layers: range) -> bool:
    """Return whether the same parameters are trained in each of these layers."""
    trained = [
        [
            name
            for name, parameter in model.layers[str(i)].named_parameters()
            if parameter.requires_grad
        ]
        for i in layers
    ]
    return all(names == trained[0] for names in trained)


def has_one_microbatch(table: list[Action]) -> bool:
    """Return whether a table has a single micro-batch."""
    return all(action.microbatch == 0 for action in table)


def boundary_bytes(run: PlannedRun, model: Model) -> int:
    """Return the number of bytes that a stage sends to another per micro-batch."""
    itemsize = getattr(torch, run.dtype).itemsize
    return math.prod(activation_shape(model, _micro_batch(run, model.ctx))) * itemsize
