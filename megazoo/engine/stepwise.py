"""A pipeline that is driven by a custom loop: one micro-batch at a time, with its backward when the
loop calls it."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from megazoo.engine.auxiliary import check_order, losses_of, report
from megazoo.engine.microbatch import MicroBatch, Output
from megazoo.engine.pipeline import count_labels
from megazoo.engine.stage import PipelineModel, StageRun
from megazoo.engine.transport import RankTransport
from megazoo.parallel.collectives import all_reduce, broadcast_from_stage
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.schedule import Action, Exchange, Transfer


def run_stepwise(
    model: PipelineModel, batches: list[MicroBatch], loss_scale: float = 1.0
) -> Iterator[Output]:
    """Yield, after the forward of each micro-batch, its part of the mean loss over the labelled
    tokens of the global batch.

    Every rank of the pipeline runs this together and gets the same loss, 0-dimensional fp32.
    `loss.backward()`, called on all of them, runs the backward of this micro-batch through all
    stages. Only one stage works at a time; `run_pipeline` is the fast alternative.
    """
    ctx = model.ctx
    with propagate_errors(ctx):
        labelled = count_labels(model, batches, ctx.token_axis.group)
        names = model.engine.auxiliary_names
        turns = [Action(kind, 0, number) for number in range(len(batches)) for kind in "FB"]
        check_order(names, turns, len(batches))
        losses = losses_of(model, names, batches, labelled, ctx.token_axis)
    # The gradient of the loss is known before backward, except for float16 with a custom scaler,
    # which passes its scale in backward.
    known = model.dtype != torch.float16 or model.engine.loss_scale is not None
    run = StepwiseRun(
        model,
        batches,
        labelled,
        RankTransport(model, batches),
        loss_scale=loss_scale,
        backward_is_next=known,
        auxiliary=losses,
    )
    for number in range(len(batches)):
        with propagate_errors(ctx):
            loss = run.forward_through(number)
        yield Output(with_backward(loss, partial(run.backward_through, number)))
        with propagate_errors(ctx):
            run.transport.wait_for_sends()
    with propagate_errors(ctx):
        report(model, run.auxiliary)


class StepwiseRun(StageRun):
    """A run of one micro-batch at a time through all stages; each stage waits for the previous one.

    The transfers of all ranks form one chain, and each rank starts its transfers in that order, so
    no send can wait for a later one.
    """

    transport: RankTransport

    def forward_through(self, number: int) -> torch.Tensor:
        """Run the forward of a micro-batch; return its part of the mean loss, the same on every
        rank."""
        for stage in self.model.stages:
            action = Action("F", stage.index, number)
            if not stage.first:
                self._receive(action, stage.index - 1)
            self.forward(action, train=True)
            if not stage.last:
                self._send(action._replace(stage=stage.index + 1))
        last = self.model.stages[-1].last
        loss = self.losses[-1].float() if last else torch.zeros((), device=self.ctx.device)
        all_reduce(loss, self.ctx.token_axis.group if last else None)
        return broadcast_from_stage(loss, self.ctx.placement.last_rank, self.ctx)

    def backward_through(self, number: int, gradient: float) -> None:
        """Run the backward of a micro-batch. gradient: that of the loss."""
        with propagate_errors(self.ctx):
            for stage in reversed(self.model.stages):
                action = Action("B", stage.index, number)
                if not stage.last:
                    self._receive(action, stage.index + 1)
                self.backward(action, gradient)
                if not stage.first:
                    self._send(action._replace(stage=stage.index - 1))

    def _receive(self, action: Action, stage: int) -> None:
        """Start receiving the input of an action, if another rank has the other stage."""
        source = self.ctx.placement.rank_of(stage)
        if source == self.ctx.pp_rank:
            return
        transfer = Transfer(action, source, self.ctx.pp_rank)
        self.transport.exchange(Exchange(sends=(), receives=(transfer,)))

    def _send(self, action: Action) -> None:
        """Start sending the input of an action of another stage, if that stage is on another
        rank."""
        target = self.ctx.placement.rank_of(action.stage)
        if target == self.ctx.pp_rank:
            return
        transfer = Transfer(action, self.ctx.pp_rank, target)
        self.transport.exchange(Exchange(sends=(transfer,), receives=()))


def with_backward(loss: torch.Tensor, backward: Callable[[float], None]) -> torch.Tensor:
    """Return `loss`, 0-dimensional, with a backward that calls backward(its gradient)."""
    return _Loss.apply(torch.zeros((), requires_grad=True), loss, backward)


class _Loss(torch.autograd.Function):
    """A number whose backward calls a function."""

    @staticmethod
    def forward(ctx, _, loss: torch.Tensor, backward: Callable[[float], None]):
        ctx.run = backward
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        ctx.run(gradient.item())
        return None, None, None
