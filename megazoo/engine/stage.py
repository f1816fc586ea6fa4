"""The run of a stage: its forward on a micro-batch, with the loss on the last stage, and its
backward.

Training, evaluation, `model(...)`, custom loops, generation, the planner and the check of types run
stages with it. A transport brings what a stage receives, and takes what it sends.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError
from megazoo.layers.auxiliary import AuxiliaryLosses, collecting
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.deferred import WeightQueue
from megazoo.parallel.schedule import Action
from megazoo.parallel.stages import Stage
from megazoo.parallel.storage import storage_of
from megazoo.torch_internals import run_backward


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


class Transport(Protocol):
    """Brings the input of each action of a run, and takes the outputs: see transport.py."""

    def take(self, action: Action) -> torch.Tensor | None:
        """Return what another action has computed for this one. None if the action needs nothing:
        the forward of the first stage, or the backward of the last one."""

    def pass_on(self, consumer: Action, tensor: torch.Tensor) -> bool:
        """Take the input of an action of another stage. Return whether it leaves this rank, so that
        only the transport needs its memory."""


def run_stage(
    model: PipelineModel,
    stage: Stage,
    batch: MicroBatch,
    received: torch.Tensor | None,
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Run the forward of a stage.

    Args:
        model: the model.
        stage: a stage of this rank.
        batch: the micro-batch.
        received: the output of the previous stage; None for the first stage.
        finish: on the last stage, finish(output) computes what is returned.

    Returns:
        The activations for the next stage, `activation_shape`; on the last stage those of the last
        layer, or the result of finish.
    """
    x = batch.input_ids if stage.first else received
    assert x is not None  # the first stage has token ids, the others what they receive
    output = model.forward_stage(x, batch, stage)
    return finish(output) if stage.last and finish else output


def activation_shape(model: PipelineModel, batch: MicroBatch) -> tuple[int, int, int]:
    """Return the shape of the activations between stages, and of their gradients, on this rank:
    (rows, tokens, hidden)."""
    rows, tokens = batch.shape
    parts = model.ctx.tp_size if model.ctx.sequence_parallel else 1
    return rows, tokens // parts, model.config.hidden_size


class StageRun:
    """One run of micro-batches through the stages of this rank.

    Args:
        model: the model.
        batches: the micro-batches.
        labelled: the number of labels of the mean loss, 0-dimensional.
        transport: brings the input of an action, and takes the outputs.
        stages: those that run; by default all of this rank.
        loss_scale: factor of the gradients, for float16.
        backward_is_next: the last stage runs each backward directly after the forward, with a known
            gradient, so that its head may compute gradients in forward.
        collect: collect(outputs, batch) returns the part of the last stage's outputs to keep.
        loss_fn: loss_fn(logits, labels), a custom loss: the mean of a micro-batch.
        head: computes the outputs and the loss on the last stage; by default the model's head.
        weight_queue: stores the weight gradients, for a schedule that computes them separately.
        auxiliary: collects auxiliary losses.

    Attributes:
        graphs: by stage and micro-batch, the input and output of a forward whose backward follows.
        weights: by stage and micro-batch, the function that computes the gradients of the weights.
        losses: the part of each micro-batch in the mean; fp64, because they are summed.
        collected: what `collect` returned.
    """

    def __init__(
        self,
        model: PipelineModel,
        batches: list[MicroBatch],
        labelled: torch.Tensor,
        transport: Transport,
        *,
        stages: list[Stage] | None = None,
        loss_scale: float = 1.0,
        backward_is_next: bool = True,
        collect: Callable | None = None,
        loss_fn: Callable | None = None,
        head: Any = None,
        weight_queue: WeightQueue | None = None,
        auxiliary: AuxiliaryLosses | None = None,
    ):
        self.model, self.ctx, self.batches = model, model.ctx, batches
        self.transport = transport
        self.labelled = labelled.clamp(min=1).float()
        self.loss_scale, self.backward_is_next = loss_scale, backward_is_next
        self.collect, self.loss_fn, self.weight_queue = collect, loss_fn, weight_queue
        self.head, self.auxiliary = head, auxiliary
        self.stages = {stage.index: stage for stage in stages or model.stages}
        engine = getattr(model, "engine", None)
        self.first_trained_stage = engine.first_trained_stage if engine else 0
        self.graphs: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self.weights: dict[tuple[int, int], Callable[[], None]] = {}
        self.losses: list[torch.Tensor] = []
        self.collected: list[torch.Tensor] = []

    def forward(self, action: Action, train: bool) -> None:
        """Run the forward of a micro-batch in a stage, on the received activations. The last stage
        also computes the micro-batch's part of the mean loss, if it has labels. train: whether a
        backward follows."""
        stage, batch = self.stages[action.stage], self.batches[action.microbatch]
        received = self.transport.take(action)
        if received is not None:
            # stages before the first trained one need no gradient; they get zeros
            received.requires_grad_(train and stage.index > self.first_trained_stage)
        with torch.set_grad_enabled(train), collecting(self.auxiliary):
            output = run_stage(
                self.model,
                stage,
                batch,
                received,
                lambda output: self._finished(output, batch),
            )
        if not stage.last:
            self._check_activations(output, stage, batch)
            follows = action._replace(stage=stage.index + 1)
            leaves = self.transport.pass_on(follows, output.detach())
            # backward needs the graph of an output, not its values
            if train and leaves and output is not received:
                output.data = torch.empty(1, dtype=output.dtype, device=output.device)
        if train:
            self.graphs[action.stage, action.microbatch] = (received, output)

    def _check_activations(self, output: torch.Tensor, stage: Stage, batch: MicroBatch) -> None:
        shape = activation_shape(self.model, batch)
        if (tuple(output.shape), output.dtype) != (shape, self.model.dtype):
            raise UserError(
                f"forward_stage of stage {stage.index} returns {output.dtype} "
                f"{list(output.shape)}: it must return {self.model.dtype} {list(shape)}"
            )

    def _finished(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the result of `_finish`, before whose backward the head's parameters are
        gathered."""
        storage = storage_of(self.model)
        return storage.run(self._finish, x, batch) if storage else self._finish(x, batch)

    def _finish(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the micro-batch's part of the mean loss, 0-dimensional fp32, or x without a loss.
        x: the output of the last stage."""
        head, outputs = self.head or self.model.output_head, None
        if self.collect:
            storage = storage_of(self.model)
            outputs = storage.run(head.outputs, x, batch) if storage else head.outputs(x, batch)
            self.collected.append(self.collect(outputs, batch))
        if not head.has_loss(batch):
            return x
        factor = self.loss_scale / self.labelled if self.backward_is_next else None
        loss = head.loss(x, batch, factor, outputs=outputs, loss_fn=self.loss_fn) / self.labelled
        self.losses.append(loss.detach().double())
        return loss

    def backward(self, action: Action, factor: float = 1.0) -> None:
        """Run the backward of a micro-batch in a stage. An "I" action computes all gradients except
        those that wait in the weight queue.

        factor: an additional factor of the gradient of the loss, in addition to the loss scale.
        """
        received, output = self.graphs.pop((action.stage, action.microbatch))
        if self.auxiliary:
            self.auxiliary.start_backward()  # before this rank waits for a later stage
        gradient = self.transport.take(action)
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
            self.transport.pass_on(action._replace(stage=action.stage - 1), gradient)
