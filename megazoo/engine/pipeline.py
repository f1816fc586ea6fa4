"""Run the table of a schedule on this rank: forwards, backwards, and the point-to-point
communication between stages."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megazoo.engine.auxiliary import check_order, losses_of, report
from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError
from megazoo.layers.auxiliary import AuxiliaryLosses, collecting
from megazoo.parallel.collectives import all_reduce, broadcast_from_stage
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.deferred import WeightQueue
from megazoo.parallel.p2p import start_receive, start_send
from megazoo.parallel.schedule import (
    FORWARD_ONLY,
    Action,
    Exchange,
    Schedule,
    Transfer,
    backward_follows,
    program,
)
from megazoo.parallel.stages import Stage
from megazoo.parallel.timing import spent
from megazoo.torch_internals import run_backward

MAX_OPEN_EXCHANGES = 2  # limit of unfinished sends when `exchange` returns


class PipelineModel(Protocol):
    """The attributes of a model that a run needs, such as `megazoo.models.Model`.

    stages: those of this rank. dtype, config.hidden_size: of the activations between stages.
    output_head: on the rank with the last stage, applied to its output: see
    `megazoo.models.outputs`. A model that is trained also has `engine`, its TrainingEngine.
    """

    ctx: ParallelContext
    stages: list[Stage]
    config: Any

    def forward_stage(self, x: torch.Tensor, batch: MicroBatch, stage: Stage) -> torch.Tensor: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def output_head(self) -> Any: ...

    @property
    def engine(self) -> Any: ...


@dataclass
class Result:
    """The result of a run.

    loss: 0-dimensional fp32. labelled: the number of labelled tokens, 0-dimensional fp64.
    collected: the collected outputs, on the last stage.
    """

    loss: torch.Tensor
    labelled: torch.Tensor
    collected: torch.Tensor | None


def run_pipeline(
    model: PipelineModel,
    batches: list[MicroBatch],
    schedule: Schedule | None = None,
    *,
    global_batch: bool = True,
    collect: Callable | None = None,
    loss_fn: Callable | None = None,
    loss_scale: float = 1.0,
    weight_queue: WeightQueue | None = None,
) -> Result:
    """Run the micro-batches through all stages. The loss is the mean over the labelled tokens of
    the global batch.

    All ranks of the world (or of the replica) call it together and get the same loss (nan without
    targets). The mean is over labelled tokens, not over the means of micro-batches: with uneven
    labels the two differ, and only the first is independent of the layout.

    Args:
        model: the model.
        batches: the micro-batches of this replica.
        schedule: one of `SCHEDULES`. Afterwards the gradient of each parameter is this replica's
            part of the gradient of the mean, times loss_scale. None: forwards only.
        global_batch: False: the mean is over the batch of this replica.
        collect: collect(outputs, batch) returns the part of the last stage's outputs to keep.
        loss_fn: loss_fn(logits, labels), a custom loss: the mean of a micro-batch. The means are
            weighted by label_count.
        loss_scale: factor of the gradients, for float16.
        weight_queue: stores the weight gradients of linear layers and experts, for a schedule that
            computes them separately.

    Returns:
        The loss; and on the last stage the collected outputs, concatenated along the batch.
    """
    ctx = model.ctx
    others = (ctx.token_axis if global_batch else ctx.cp).group
    labelled = count_labels(model, batches, others)
    order = schedule or FORWARD_ONLY[ctx.placement.name]
    table = program(order, ctx.pp_rank, ctx.pp_size, ctx.virtual_size, len(batches))
    names = model.engine.auxiliary_names if schedule else None
    if names:
        of_last = program(
            order, ctx.placement.last_rank, ctx.pp_size, ctx.virtual_size, len(batches)
        )
        check_order(names, of_last, len(batches))
    run = PipelineRun(
        model,
        batches,
        labelled,
        loss_scale=loss_scale,
        backward_is_next=backward_follows(table, ctx.stage_count - 1),
        collect=collect,
        loss_fn=loss_fn,
        weight_queue=weight_queue,
        auxiliary=losses_of(model, names, batches, labelled),
    )
    for item in table:
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
    run.wait_for_sends()
    report(model, run.auxiliary)
    return _result(run, labelled, others)


def _result(run: "PipelineRun", labelled: torch.Tensor, group: dist.ProcessGroup | None) -> Result:
    """Sum the losses of all micro-batches and of the ranks of a group, and send the sum to every
    stage. labelled: the number of labels of the mean."""
    ctx = run.ctx
    loss = torch.zeros((), dtype=torch.float64, device=ctx.device)
    if run.model.stages[-1].last:
        loss += sum(run.losses) if run.losses else torch.nan
        all_reduce(loss, group)
    sums = torch.stack([loss, labelled])
    loss, labelled = broadcast_from_stage(sums, ctx.placement.last_rank, ctx)
    return Result(loss.float(), labelled, torch.cat(run.collected) if run.collected else None)


def count_labels(
    model: PipelineModel, batches: list[MicroBatch], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the number of labels of the micro-batches, summed over a group: fp64, 0-dimensional; 0
    on ranks without the last stage."""
    labelled = torch.zeros((), dtype=torch.float64, device=model.ctx.device)
    if model.stages[-1].last:
        labelled += sum(model.output_head.label_count(batch) for batch in batches)
        all_reduce(labelled, group)
    return labelled


class PipelineRun:
    """One run of micro-batches on this rank. It holds received tensors, tensors to send, and graphs
    that wait for their backward.

    labelled: the number of labels of the mean loss. loss_scale: of float16. backward_is_next: the
    last stage runs each backward directly after the forward, with a known gradient. auxiliary:
    collects auxiliary losses. For the other arguments see `run_pipeline`.
    """

    def __init__(
        self,
        model: PipelineModel,
        batches: list[MicroBatch],
        labelled: torch.Tensor,
        *,
        loss_scale: float = 1.0,
        backward_is_next: bool = True,
        collect: Callable | None = None,
        loss_fn: Callable | None = None,
        weight_queue: WeightQueue | None = None,
        auxiliary: AuxiliaryLosses | None = None,
    ):
        self.model, self.ctx, self.batches = model, model.ctx, batches
        self.labelled = labelled.clamp(min=1).float()
        self.loss_scale, self.backward_is_next = loss_scale, backward_is_next
        self.collect, self.loss_fn, self.weight_queue = collect, loss_fn, weight_queue
        self.auxiliary = auxiliary
        self.stages = {stage.index: stage for stage in model.stages}
        engine = getattr(model, "engine", None)
        self.first_trained_stage = engine.first_trained_stage if engine else 0
        # by consuming action: the received tensor, and the work to wait for; no work if it is from
        # another stage of this rank
        self.arrived: dict[Action, tuple] = {}
        # by consuming action of another rank: the tensor to send
        self.leaving: dict[Action, torch.Tensor] = {}
        # by stage and micro-batch: input and output of a forward
        self.graphs: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        # by stage and micro-batch: the function that computes the gradients of the weights
        self.weights: dict[tuple[int, int], Callable[[], None]] = {}
        # unfinished sends: the work to wait for, and the tensor
        self.open: deque[tuple] = deque()
        # per micro-batch, its part of the mean; double, because they are summed
        self.losses: list[torch.Tensor] = []
        self.collected: list[torch.Tensor] = []

    def forward(self, action: Action, train: bool) -> None:
        """Run the forward of a micro-batch in a stage, on the received activations. The last stage
        also computes the micro-batch's part of the mean loss, if it has labels. train: whether a
        backward follows."""
        stage, batch = self.stages[action.stage], self.batches[action.microbatch]
        received = self._take(action)
        # stages before the first trained one need no gradient; they get zeros
        passes_gradients = train and stage.index > self.first_trained_stage
        x = batch.input_ids if received is None else received.requires_grad_(passes_gradients)
        assert x is not None  # the first stage has token ids
        with torch.set_grad_enabled(train), collecting(self.auxiliary):
            output = self.model.forward_stage(x, batch, stage)
            if not stage.last:
                self._check_activations(output, stage, self.shape(action.microbatch))
                self._pass_on(action._replace(stage=stage.index + 1), output.detach())
            else:
                outputs = self._collected_outputs(output, batch)
                if batch.targets is not None or batch.labels is not None:
                    factor = self.loss_scale / self.labelled if self.backward_is_next else None
                    head, own = self.model.output_head, self.loss_fn
                    output = head.loss(output, batch, factor, outputs=outputs, loss_fn=own)
                    output = output / self.labelled
                    self.losses.append(output.detach().double())
        if train:
            self.graphs[action.stage, action.microbatch] = (received, output)

    def _check_activations(self, output: torch.Tensor, stage: Stage, shape: tuple) -> None:
        if (tuple(output.shape), output.dtype) != (shape, self.model.dtype):
            raise UserError(
                f"forward_stage of stage {stage.index} returns {output.dtype} "
                f"{list(output.shape)}: it must return {self.model.dtype} {list(shape)}"
            )

    def _collected_outputs(self, x: torch.Tensor, batch: MicroBatch):
        """Return the outputs of the head after collecting from them, or None if nothing is
        collected. x: the output of the last stage."""
        if not self.collect:
            return None
        outputs = self.model.output_head.outputs(x, batch)
        self.collected.append(self.collect(outputs, batch))
        return outputs

    def backward(self, action: Action, factor: float = 1.0) -> None:
        """Run the backward of a micro-batch in a stage; for an "I" action only that of the inputs.

        factor: an additional factor of the gradient of the loss, in addition to the loss scale.
        """
        received, output = self.graphs.pop((action.stage, action.microbatch))
        if self.auxiliary:
            self.auxiliary.start_backward()  # before this rank waits for a later stage
        gradient = self._take(action)
        if gradient is None:
            gradient = torch.full_like(output, self.loss_scale * factor)
        if self.auxiliary:
            self.auxiliary.set_scale(self.loss_scale * factor)
        if output.requires_grad:  # otherwise nothing is trained in this stage or before it
            run_backward(output, gradient)
        if action.kind == "I":
            assert self.weight_queue  # the schedule splits the backward
            self.weights[action.stage, action.microbatch] = self.weight_queue.take()
        if received is not None:
            gradient = torch.zeros_like(received) if received.grad is None else received.grad
            self._pass_on(action._replace(stage=action.stage - 1), gradient)

    @spent("communication", "exchange")
    def exchange(self, exchange: Exchange) -> None:
        """Start a transfer. It waits only for the completion of much earlier sends."""
        for transfer in exchange.receives:
            buffer = self._empty_input(transfer.consumer.microbatch)
            work = start_receive(buffer, transfer.source, self.ctx)
            self.arrived[transfer.consumer] = (buffer, work)
        for transfer in exchange.sends:
            tensor = self.leaving.pop(transfer.consumer).contiguous()
            work = start_send(tensor, transfer.target, self.ctx)
            self._release(transfer)
            if work is not None:
                self.open.append((work, tensor))
        while len(self.open) > MAX_OPEN_EXCHANGES:
            self._close_oldest()

    @spent("communication", "wait")
    def wait_for_sends(self) -> None:
        """Wait until all sends are complete."""
        while self.open:
            self._close_oldest()

    def _take(self, action: Action) -> torch.Tensor | None:
        """Return the tensor that an action needs, after it has arrived; None if it needs none."""
        if action not in self.arrived:
            return None
        buffer, work = self.arrived.pop(action)
        if work is not None:
            with spent("communication", "wait"):
                work.wait()
        return buffer

    def _pass_on(self, consumer: Action, tensor: torch.Tensor) -> None:
        """Store the input of an action of another stage until it is sent, or, if this rank has that
        stage, until the action runs."""
        if consumer.stage in self.stages:
            self.arrived[consumer] = (tensor, None)
        else:
            self.leaving[consumer] = tensor

    def shape(self, microbatch: int) -> tuple[int, int, int]:
        """Return the shape of the activations of a micro-batch between stages, and of their
        gradients."""
        batch, sequence = self.batches[microbatch].shape
        parts = self.ctx.tp_size if self.ctx.sequence_parallel else 1
        return batch, sequence // parts, self.model.config.hidden_size

    def _empty_input(self, microbatch: int) -> torch.Tensor:
        """Return memory for a tensor from another stage."""
        return torch.empty(self.shape(microbatch), dtype=self.model.dtype, device=self.ctx.device)

    def _release(self, transfer: Transfer) -> None:
        """Free the memory of an output that is being sent: backward needs its graph, not its
        values."""
        kind, stage, microbatch = transfer.consumer
        if kind == "F" and (graph := self.graphs.get((stage - 1, microbatch))):
            output = graph[1]
            output.data = torch.empty(1, dtype=output.dtype, device=output.device)

    def _close_oldest(self) -> None:
        work, _tensor = self.open.popleft()  # the tensor lives until its send is done
        work.wait()
