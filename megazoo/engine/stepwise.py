"""A pipeline that a user's own loop drives: one micro-batch after the other, its backward when the
loop asks for it."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from megazoo.engine.microbatch import MicroBatch, Output
from megazoo.engine.pipeline import Run
from megazoo.parallel.collectives import all_reduce, broadcast_from_stage
from megazoo.parallel.failure import failing_together
from megazoo.parallel.p2p import receive_from_stage, send_to_stage
from megazoo.parallel.schedule import Action


def run_stepwise(model, batches: list[MicroBatch], loss_scale: float = 1.0) -> Iterator[Output]:
    """Yields, after each micro-batch's forward, its part of the mean loss over the global batch's
    labelled tokens.

    Every rank of the pipeline goes through this together and gets the same loss, 0-dimensional
    fp32; `loss.backward()`, on all of them, is this micro-batch's backward through all stages. No
    stage works while another does: for training at speed there is `run_pipeline`. model: as there.
    """
    ctx, last = model.ctx, model.stages[-1].last
    labelled = torch.zeros((), dtype=torch.float64, device=ctx.device)
    with failing_together(ctx):
        if last:
            labelled += sum(model.label_count(batch) for batch in batches)
            all_reduce(labelled, ctx.dp_group)
    # else the scale comes with the gradient
    at_once = model.dtype != torch.float16 or model.loss_scale is not None
    run = Run(model, batches, labelled.clamp(min=1).float(), loss_scale=loss_scale, at_once=at_once)
    sent = []

    def receive(action: Action, stage: int) -> None:
        """What makes the action's input lies on another stage."""
        shape = run.shape(action.microbatch)
        run.arrived[action] = (receive_from_stage(shape, model.dtype, stage % ctx.pp_size, ctx), [])

    def send(action: Action) -> None:
        """The input of an action of another stage."""
        tensor = run.leaving.pop(action).contiguous()
        sent.append((send_to_stage(tensor, action.stage % ctx.pp_size, ctx), tensor))

    def forward(number: int) -> torch.Tensor:
        for stage in model.stages:
            action = Action("F", stage.index, number)
            if not stage.first:
                receive(action, stage.index - 1)
            run.forward(action, train=True)
            if not stage.last:
                send(action._replace(stage=stage.index + 1))
        loss = run.losses[-1].float() if last else torch.zeros((), device=ctx.device)
        all_reduce(loss, ctx.dp_group if last else None)
        return broadcast_from_stage(loss, ctx.pp_size - 1, ctx)

    def backward(number: int, factor: float) -> None:
        with failing_together(ctx):
            for stage in reversed(model.stages):
                action = Action("B", stage.index, number)
                if not stage.last:
                    receive(action, stage.index + 1)
                run.backward(action, factor)
                if not stage.first:
                    send(action._replace(stage=stage.index - 1))

    for number in range(len(batches)):
        with failing_together(ctx):
            loss = forward(number)
        yield Output(with_backward(loss, partial(backward, number)))
        with failing_together(ctx):
            while sent:
                sent.pop(0)[0].wait()


def with_backward(loss: torch.Tensor, backward: Callable[[float], None]) -> torch.Tensor:
    """`loss`, 0-dimensional, with a backward that calls backward(its gradient)."""
    return _Loss.apply(torch.zeros((), requires_grad=True), loss, backward)


class _Loss(torch.autograd.Function):
    """A number whose backward is a function's."""

    @staticmethod
    def forward(ctx, _, loss: torch.Tensor, backward: Callable[[float], None]):
        ctx.run = backward
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        ctx.run(gradient.item())
        return None, None, None
