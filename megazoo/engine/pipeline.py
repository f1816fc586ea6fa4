"""Run the table of a schedule on this rank: forwards, backwards, and transfers between stages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megazoo.engine.auxiliary import check_order, declared_losses, losses_of, report
from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.stage import PipelineModel, StageRun
from megazoo.engine.transport import RankTransport
from megazoo.parallel.collectives import all_reduce, broadcast_from_stage
from megazoo.parallel.deferred import WeightQueue
from megazoo.parallel.schedule import FORWARD_ONLY, Exchange, Schedule, backward_follows, program
from megazoo.parallel.storage import storage_of
from megazoo.parallel.timing import spent


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
    keep_graph: bool = False,
    collect: Callable | None = None,
    loss_fn: Callable | None = None,
    head: Any = None,
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
        keep_graph: the loss and the collected outputs can be differentiated, where gradients are
            enabled. Only without a pipeline, and for one micro-batch.
        collect: collect(outputs, batch) returns the part of the last stage's outputs to keep.
        loss_fn: loss_fn(logits, labels), a custom loss: the mean of a micro-batch. The means are
            weighted by label_count.
        head: computes the outputs and the loss on the last stage; by default the model's head.
        loss_scale: factor of the gradients, for float16.
        weight_queue: stores the weight gradients of linear layers and experts, for a schedule that
            computes them separately.

    Returns:
        The loss; and on the last stage the collected outputs, concatenated along the batch.
    """
    ctx = model.ctx
    axis = ctx.token_axis if global_batch else ctx.cp
    labelled = count_labels(model, batches, axis.group, head)
    tokens = count_labels(model, batches, axis.group) if head else labelled
    keep_graph = keep_graph and torch.is_grad_enabled()
    order = schedule or FORWARD_ONLY[ctx.placement.name]
    table = program(order, ctx.pp_rank, ctx.pp_size, ctx.virtual_size, len(batches))
    names = model.engine.auxiliary_names if schedule else None
    if keep_graph and any(map((head or model.output_head).has_loss, batches)):
        names = declared_losses(model)
    if names and schedule:
        of_last = program(
            order, ctx.placement.last_rank, ctx.pp_size, ctx.virtual_size, len(batches)
        )
        check_order(names, of_last, len(batches))
    transport = RankTransport(model, batches)
    run = StageRun(
        model,
        batches,
        labelled,
        transport,
        loss_scale=loss_scale,
        backward_is_next=not keep_graph and backward_follows(table, ctx.stage_count - 1),
        collect=collect,
        loss_fn=loss_fn,
        head=head,
        weight_queue=weight_queue,
        auxiliary=losses_of(model, names, batches, tokens, axis),
    )
    for item in table:
        if isinstance(item, Exchange):
            transport.exchange(item)
            continue
        with spent("forward" if item.kind == "F" else "backward", str(item)):
            if item.kind == "F":
                run.forward(item, train=schedule is not None or keep_graph)
            elif item.kind == "W":
                run.weights.pop((item.stage, item.microbatch))()
            else:
                run.backward(item)
                model.engine.gradients.buckets.end_backward()
    transport.wait_for_sends()
    result = _result(run, labelled, axis.group)
    if (storage := storage_of(model)) and not keep_graph:
        storage.release()
    if not keep_graph:
        report(model, run.auxiliary)
    elif run.losses:
        ((_, part),) = run.graphs.values()
        result.loss = _WithValue.apply(part, result.loss)
        if run.auxiliary and result.loss.requires_grad:
            result.loss.register_hook(run.auxiliary.set_scale)
    return result


class _WithValue(torch.autograd.Function):
    """Return a sum over the ranks, whose gradient is passed to this rank's part."""

    @staticmethod
    def forward(ctx, part: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient, None


def _result(run: StageRun, labelled: torch.Tensor, group: dist.ProcessGroup | None) -> Result:
    """Sum the losses of all micro-batches and of the ranks of a group, and send the sum to every
    stage. labelled: the number of labels of the mean."""
    ctx = run.ctx
    loss = torch.zeros((), dtype=torch.float64, device=ctx.device)
    if run.model.stages[-1].last:
        loss += sum(run.losses) if run.losses else torch.nan
        all_reduce(loss, group)
    sums = torch.stack([loss, labelled])
    loss, labelled = broadcast_from_stage(sums, ctx.placement.last_rank, ctx)
    collected = None
    if len(run.collected) == 1:  # without a copy, if it is contiguous as the result of cat is
        collected = run.collected[0].contiguous()
    elif run.collected:
        collected = torch.cat(run.collected)
    return Result(loss.float(), labelled, collected)


def count_labels(
    model: PipelineModel,
    batches: list[MicroBatch],
    group: dist.ProcessGroup | None,
    head: Any = None,
) -> torch.Tensor:
    """Return the number of labels of the micro-batches, summed over a group: fp64, 0-dimensional; 0
    on ranks without the last stage."""
    labelled = torch.zeros((), dtype=torch.float64, device=model.ctx.device)
    if model.stages[-1].last:
        head = head or model.output_head
        labelled += sum(head.label_count(batch) for batch in batches)
        all_reduce(labelled, group)
    return labelled
