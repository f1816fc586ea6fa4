"""Runs a schedule's table on this rank: forwards, backwards, and the point-to-point traffic between
stages."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError
from megazoo.parallel.collectives import all_reduce, broadcast_from_stage
from megazoo.parallel.deferred import WeightQueue
from megazoo.parallel.p2p import exchange_with_stages
from megazoo.parallel.schedule import (
    Action,
    Exchange,
    Transfer,
    backward_follows,
    forward_only,
    program,
)
from megazoo.parallel.timing import spent
from megazoo.torch_internals import run_backward

MAX_OPEN_EXCHANGES = 2  # sends that may still be under way behind the newest one


@dataclass
class Result:
    """What came of a pass: the loss, 0-dimensional fp32, over how many labelled tokens,
    0-dimensional fp64, and what was collected, on the last stage."""

    loss: torch.Tensor
    labelled: torch.Tensor
    collected: torch.Tensor | None


def run_pipeline(
    model,
    batches: list[MicroBatch],
    schedule=None,
    *,
    global_batch: bool = True,
    collect: Callable | None = None,
    loss_fn: Callable | None = None,
    loss_scale: float = 1.0,
    weight_queue: WeightQueue | None = None,
) -> Result:
    """Run the micro-batches through all stages; the loss is the mean over the labelled tokens of
    the global batch.

    model: a `megazoo.models.base.Model`, or what has as much of it as is called here. schedule: of
    `SCHEDULES`, after which each parameter's gradient holds this replica's part of the gradient of
    that mean, times loss_scale; None runs the forwards only. weight_queue: where the linear layers
    leave their weights' gradients, for a schedule that has times of its own for them. global_batch
    False: the mean is over this replica's batch. collect(outputs, batch): what to keep of the last
    stage's outputs. loss_fn(logits, labels): a micro-batch's mean instead of loss_sum; the means
    are weighed by label_count.
    Every rank of the world (of the replica) calls this together and gets the same 0-dimensional
    fp32 loss (nan without targets); the last stage also gets what was collected, along the batch.

    The mean is over labelled tokens, not over micro-batches' means: with labels spread unevenly the
    two differ, and only the first is independent of the layout.
    """
    ctx, last = model.ctx, model.stages[-1].last
    replicas = ctx.dp_group if global_batch else None
    labelled = torch.zeros((), dtype=torch.float64, device=ctx.device)
    if last:
        labelled += sum(model.label_count(batch) for batch in batches)
        all_reduce(labelled, replicas)
    items = program(
        schedule or forward_only, ctx.pp_rank, ctx.pp_size, ctx.virtual_size, len(batches)
    )
    at_once = backward_follows(items, ctx.stage_count - 1)
    run = Run(
        model,
        batches,
        labelled.clamp(min=1).float(),
        collect,
        loss_fn,
        loss_scale,
        weight_queue,
        at_once,
    )
    for item in items:
        if isinstance(item, Exchange):
            run.exchange(item)
            continue
        with spent("forward" if item.kind == "F" else "backward", str(item)):
            if item.kind == "F":
                run.forward(item, train=schedule is not None)
            elif item.kind == "W":
                run.weights.pop((item.stage, item.microbatch))()
            else:
                run.backward(item)
    run.finish()
    loss = torch.zeros((), dtype=torch.float64, device=ctx.device)
    if last:
        loss += sum(run.losses) if run.losses else torch.nan
        all_reduce(loss, replicas)
    loss, labelled = broadcast_from_stage(torch.stack([loss, labelled]), ctx.pp_size - 1, ctx)
    return Result(loss.float(), labelled, torch.cat(run.collected) if run.collected else None)


class Run:
    """The state of one pass over a table: tensors that arrived, tensors that will leave, graphs
    awaiting backward."""

    def __init__(
        self,
        model,
        batches: list[MicroBatch],
        labelled: torch.Tensor,
        collect: Callable | None = None,
        loss_fn: Callable | None = None,
        loss_scale: float = 1.0,
        weight_queue: WeightQueue | None = None,
        at_once: bool = True,
    ):
        """at_once: the last stage's backward of a micro-batch comes right after its forward."""
        self.at_once = at_once
        self.collect, self.loss_fn, self.loss_scale, self.weight_queue = (
            collect,
            loss_fn,
            loss_scale,
            weight_queue,
        )
        self.model, self.ctx, self.batches, self.labelled = model, model.ctx, batches, labelled
        self.stages = {stage.index: stage for stage in model.stages}
        self.arrived: dict[Action, tuple[torch.Tensor, list]] = {}
        self.leaving: dict[Action, torch.Tensor] = {}  # by what will consume it
        self.graphs: dict[tuple[int, int], tuple] = {}  # (stage, micro-batch) -> input, output
        # likewise -> computes the weights' gradients
        self.weights: dict[tuple[int, int], Callable[[], None]] = {}
        self.open: deque = deque()
        # of each micro-batch, its part of the mean; in double: they are summed
        self.losses: list[torch.Tensor] = []
        self.collected: list[torch.Tensor] = []

    def forward(self, action: Action, train: bool) -> None:
        stage, batch = self.stages[action.stage], self.batches[action.microbatch]
        received = self._take(action)
        x = batch.input_ids if stage.first else received.requires_grad_(train)
        with torch.set_grad_enabled(train):
            output = self.model.forward_stage(x, batch, stage)
            if stage.last:
                output = self._finished(output, batch)
            elif (output.shape, output.dtype) != (
                shape := self.shape(action.microbatch),
                self.model.dtype,
            ):
                sent, expected = (
                    f"{output.dtype} {list(output.shape)}",
                    f"{self.model.dtype} {list(shape)}",
                )
                raise UserError(
                    f"forward_stage of stage {stage.index} returns {sent}: stages send {expected}"
                )
            else:
                self.leaving[action._replace(stage=stage.index + 1)] = output.detach()
        if train:
            self.graphs[action.stage, action.microbatch] = (received, output)

    def _finished(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """The micro-batch's part of the loss; without labels what was collected is all there is."""
        outputs = self.model.outputs(x, batch) if self.collect or self.loss_fn else None
        if self.collect:
            self.collected.append(self.collect(outputs, batch))
        if batch.targets is None and batch.labels is None:
            return outputs
        if self.loss_fn:
            loss = self._own_loss(outputs, batch)
        elif self.collect:
            loss = self.model.loss_sum(outputs, batch)
        else:
            loss = self.model.loss_of(
                x, batch, self.loss_scale / self.labelled if self.at_once else None
            )
        loss = loss / self.labelled
        self.losses.append(loss.detach().double())
        return loss

    def _own_loss(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """What loss_fn says, times the micro-batch's labels."""
        count = self.model.label_count(batch)
        if not count:
            return outputs.float().sum() * 0  # its mean would be nan
        loss = self.loss_fn(self.model.whole_logits(outputs, batch).float(), batch.labels)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UserError("loss_fn must return one number, the mean of the micro-batch")
        if outputs.requires_grad and not loss.requires_grad:
            raise UserError(
                "loss_fn returns a number without a gradient: compute it from the logits, not detached"
            )
        return loss.float().view(()) * count

    def backward(self, action: Action, factor: float = 1.0) -> None:
        """factor: what the loss's gradient is multiplied by, beside the loss scale."""
        received, output = self.graphs.pop((action.stage, action.microbatch))
        gradient = self._take(action)
        if output.requires_grad:  # else all of a first stage is frozen
            if gradient is None:
                gradient = torch.full_like(output, self.loss_scale * factor)
            run_backward(output, gradient)
        if action.kind == "I":
            self.weights[action.stage, action.microbatch] = self.weight_queue.take()
        if received is not None:
            self.leaving[action._replace(stage=action.stage - 1)] = received.grad

    @spent("communication", "exchange")
    def exchange(self, exchange: Exchange) -> None:
        """Start an exchange's sends and receives in one go; waits only for others' part in those
        long past."""
        shapes = [self.shape(transfer.consumer.microbatch) for transfer in exchange.receives]
        buffers = [
            torch.empty(shape, dtype=self.model.dtype, device=self.ctx.device) for shape in shapes
        ]
        sent = [self.leaving.pop(transfer.consumer).contiguous() for transfer in exchange.sends]
        coming, going = exchange_with_stages(
            [
                (buffer, transfer.source)
                for buffer, transfer in zip(buffers, exchange.receives, strict=True)
            ],
            [
                (tensor, transfer.target)
                for tensor, transfer in zip(sent, exchange.sends, strict=True)
            ],
            self.ctx,
        )
        for transfer, *arrival in zip(exchange.receives, buffers, coming, strict=True):
            self.arrived[transfer.consumer] = arrival
        for transfer in exchange.sends:
            self._release(transfer)
        if going:
            self.open.append((going, sent))
        while len(self.open) > MAX_OPEN_EXCHANGES:
            self._close_oldest()

    @spent("communication", "wait")
    def finish(self) -> None:
        while self.open:
            self._close_oldest()

    def _take(self, action: Action) -> torch.Tensor | None:
        buffer, works = self.arrived.pop(action, (None, []))
        with spent("communication", "wait"):
            for work in works:
                work.wait()
        return buffer

    def shape(self, microbatch: int) -> tuple[int, int, int]:
        """Of a micro-batch's activations between stages, and of their gradients."""
        batch, sequence = self.batches[microbatch].shape
        return (
            batch,
            sequence // (self.ctx.tp_size if self.ctx.sequence_parallel else 1),
            self.model.hidden_size,
        )

    def _release(self, transfer: Transfer) -> None:
        """Free an output's memory once it is on its way: backward needs its graph, not its values."""
        kind, stage, microbatch = transfer.consumer
        if kind == "F" and (graph := self.graphs.get((stage - 1, microbatch))):
            output = graph[1]
            output.data = torch.empty(1, dtype=output.dtype, device=output.device)

    def _close_oldest(self) -> None:
        works, _tensors = self.open.popleft()  # the tensors live until their sends are done
        for work in works:
            work.wait()
