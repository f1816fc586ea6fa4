"""What each action of a schedule takes of one rank, run on the meta device under a meter: FLOPs,
bytes sent and bytes that live.

Attention and dropout are metered as the kernels of GPUs run them: without keeping the scores, and
with masks of a byte an element.
"""

import weakref
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from megazoo.cli.options import TrainingOptions
from megazoo.engine.microbatch import MicroBatch
from megazoo.models.base import Model
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.deferred import WeightQueue
from megazoo.parallel.schedule import Action, backward_follows
from megazoo.parallel.stages import Stage
from megazoo.torch_internals import (
    TorchDispatchMode,
    flash_attention_operators,
    flop_formulas,
    results_are_new,
    run_backward,
    storage_key,
)

META = torch.device("meta")

_flash, _flash_backward = flash_attention_operators()


@dataclass(frozen=True)
class Cost:
    """Of an action of one micro-batch on one rank. sent: bytes over tp. peak: the most bytes of
    this micro-batch that live during the action, held: those that live on after it."""

    flops: float
    sent: float
    peak: float
    held: float


class Meter(TorchDispatchMode):
    """Counts, of what runs on the meta device within `with meter:`, FLOPs, and bytes of the tensors
    that live.

    FLOPs are those of matrix products, two for a multiply-add. live, peak: bytes of all tensors
    that were made within, now and at most since `take`, each storage once.
    """

    def __init__(self, group):
        super().__init__()
        self.flops = self.live = self.peak = 0
        self._group, self._sent = group, group.sent if group else 0.0
        self._storages: dict[int, weakref.ref] = {}
        self._formulas = flop_formulas()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        packet = function.overloadpacket
        if packet is _flash:
            self.flops += _attention_flops(*arguments[:3])
        elif packet is _flash_backward:  # the scores, which the kernel computes again, not counted
            self.flops += 2 * _attention_flops(*arguments[1:4])
        elif packet in self._formulas:
            self.flops += self._formulas[packet](*arguments, **(options or {}), out_val=result)
        results = result if isinstance(result, tuple | list) else (result,)
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
        """The cost of what ran since the last call."""
        sent = self._group.sent if self._group else 0.0
        cost = Cost(self.flops, sent - self._sent, self.peak, self.live)
        self.flops, self._sent, self.peak = 0, sent, self.live
        return cost


def _attention_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Of all scores, as is usual, though a causal mask leaves half of them out."""
    return 2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])


class _KernelsOfDevices(TorchFunctionMode):
    """On meta torch would choose the attention that keeps its scores, and masks of dropout as wide
    as x."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        if function is F.scaled_dot_product_attention:
            q, k, v, *more = arguments
            options = (
                dict(zip(("attn_mask", "dropout_p", "is_causal"), more, strict=False)) | options
            )
            options.pop("enable_gqa", None)
            return _flash(q, k, v, **options)[0]
        if function is F.dropout:
            return torch.native_dropout(*arguments, options["p"], train=True)[0]
        return function(*arguments, **options)


def costs_of(
    model: Model,
    stage: Stage,
    training: TrainingOptions,
    queue: WeightQueue | None,
    table: list[Action],
) -> dict[str, Cost]:
    """What each kind of action of a stage takes: what `run_pipeline` does, with one micro-batch of
    `table`, on meta.

    If it is the only one of a step, the gradients come while the activations go, and count as live.
    """
    alone = is_alone(table)
    for parameter in model.parameters():
        parameter.grad = (
            None if alone else torch.empty(parameter.shape, dtype=torch.float32, device=META)
        )
    tokens = (training.micro_batch_size, _padded(training.seq_length, model.ctx))
    ids = torch.empty(tokens, dtype=torch.int64, device=META)
    batch = MicroBatch(tokens, ids, ids, length=training.seq_length, longest=training.seq_length)
    shape = boundary_shape(training, model)
    meter, costs = Meter(model.ctx.tp_group), {}
    with _KernelsOfDevices(), meter:
        received = (
            None
            if stage.first
            else torch.empty(shape, dtype=model.dtype, device=META, requires_grad=True)
        )
        output = model.forward_stage(batch.input_ids if stage.first else received, batch, stage)
        if stage.last:
            labelled = torch.ones((), device=META)
            at_once = backward_follows(table, stage.index)
            output = model.loss_of(output, batch, 1.0 / labelled if at_once else None) / labelled
    if not stage.last:  # sent: its graph remains
        output.data = torch.empty(1, dtype=output.dtype, device=META)
    costs["F"] = meter.take()
    with _KernelsOfDevices(), meter:
        gradient = (
            torch.full_like(output, 1.0)
            if stage.last
            else torch.empty(shape, dtype=model.dtype, device=META)
        )
        run_backward(output, gradient)
        weights = queue.take() if queue else None
    del received, output, gradient
    costs["I" if queue else "B"] = meter.take()
    if weights:
        with meter:
            weights()
        del weights
        costs["W"] = meter.take()
    return costs


def forward_flops(model: Model, rows: int, sequence: int) -> int:
    """Count the FLOPs of one forward, with the loss, of a whole model on the meta device."""
    ids = torch.empty(rows, sequence, dtype=torch.int64, device=META)
    batch = MicroBatch((rows, sequence), ids, ids, length=sequence, longest=sequence)
    meter = Meter(None)
    with torch.no_grad(), _KernelsOfDevices(), meter:
        for stage in model.stages:
            output = model.forward_stage(ids, batch, stage)
        model.loss_of(output, batch)
    return meter.take().flops


def costs_of_alike(
    model: Model,
    stage: Stage,
    training: TrainingOptions,
    queue: WeightQueue | None,
    table: list[Action],
) -> dict[str, Cost]:
    """As costs_of, but of many layers only a few are run, and the others taken to be like them.

    The peak is then exact or, where something after the layers' backward needs more than they,
    above what it is.
    """
    unit = training.recompute_interval if training.recompute == "full" else 1
    rest = len(stage.layers) % unit
    if len(stage.layers) <= 2 * unit + rest:
        return costs_of(model, stage, training, queue, table)
    one, two = (
        costs_of(
            model,
            replace(stage, layers=stage.layers[: count * unit + rest]),
            training,
            queue,
            table,
        )
        for count in (1, 2)
    )
    # before: the action after which this one comes
    more, costs, before = len(stage.layers) // unit - 2, {}, "F"
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


def is_alone(table: list[Action]) -> bool:
    """Whether the micro-batch of a table is the only one."""
    return all(action.microbatch == 0 for action in table)


def boundary_shape(training: TrainingOptions, model: Model) -> tuple[int, int, int]:
    """Of what a stage sends to another."""
    ctx = model.ctx
    sequence = _padded(training.seq_length, ctx) // (ctx.tp_size if ctx.sequence_parallel else 1)
    return training.micro_batch_size, sequence, model.hidden_size


def _padded(sequence: int, ctx: ParallelContext) -> int:
    return sequence + (-sequence % ctx.tp_size if ctx.sequence_parallel else 0)
