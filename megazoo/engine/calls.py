"""The calls that users make of a model to run batches. Those that train or evaluate are one line
each: see training.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megazoo.engine.auxiliary import losses_of_one
from megazoo.engine.batch import Batch
from megazoo.engine.microbatch import Output
from megazoo.engine.pipeline import count_labels, run_pipeline
from megazoo.engine.stepwise import with_backward
from megazoo.engine.training import TrainingEngine
from megazoo.errors import UserError
from megazoo.layers.auxiliary import collecting
from megazoo.parallel.agreement import Terms
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import on_all_ranks, on_replica_ranks
from megazoo.parallel.regions import reduce_from_context
from megazoo.parallel.stages import Stage


class BatchCalls:
    """The part of `Model` that runs batches, in any layout."""

    family: str
    config: Any
    seed: int
    ctx: ParallelContext
    stages: list[Stage]
    training: bool
    has_last: bool
    num_labels: int
    dtype: torch.dtype
    output_head: Any
    engine: TrainingEngine
    forward_stage: Callable[..., torch.Tensor]

    def terms(self) -> Terms:
        """Return what must be equal on the ranks that call this model."""
        settings = {"family": self.family, "seed": self.seed, "training mode": self.training}
        # dropout masks are drawn by the number of training calls
        terms = Terms(rows={"the number of training calls": self.engine.calls})
        terms.take({f"the model's {name}": value for name, value in settings.items()})
        terms.take_config(self.config)
        if self.has_last:
            settings = self.output_head.settings
            terms.rows |= settings
            terms.replicas |= settings
        return terms

    @on_replica_ranks
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        document_ids: torch.Tensor | None = None,
        return_logits: bool = False,
    ) -> Output:
        """Run one batch; call it with the same inputs on every rank of a replica.

        Inputs: see `Batch`. With labels: loss, the mean over this batch's labelled tokens, on every
        rank. Without, or with return_logits, or where the loss needs them whole anyway (pp, tp and
        cp are 1, or a classifier): logits [batch, sequence, vocabulary] ([batch, labels] of a
        classifier) on every rank of the last stage. They live as long as the output: where memory
        is short keep its loss only. The loss can be differentiated when pp is 1, with
        `sync_gradients` after backward; `train_batch` and `microbatches` train in every layout.
        """
        batch = Batch(input_ids, labels, None, attention_mask, position_ids, document_ids)
        (micro_batch,) = self.engine.micro_batches(batch, 1)
        together = self.ctx.pp_size * self.ctx.tp_size * self.ctx.cp_size == 1
        whole = self.config.num_labels or together
        collects = return_logits or labels is None or whole
        if self.ctx.pp_size > 1:
            collect = self.output_head.full_outputs if collects and self.has_last else None
            result = run_pipeline(self, [micro_batch], global_batch=False, collect=collect)
            loss, logits = with_backward(result.loss, _refuse_backward), result.collected
        else:
            head, count, losses, loss, logits = self.output_head, None, None, None, None
            if labels is not None:
                count = count_labels(self, [micro_batch], self.ctx.cp_group).clamp(min=1)
                losses = losses_of_one(self, micro_batch, count)
            with collecting(losses):
                x = self.forward_stage(micro_batch.input_ids, micro_batch, self.stages[0])
                outputs = head.outputs(x, micro_batch)
                if labels is not None:
                    loss = head.loss(x, micro_batch, outputs=outputs)
            if loss is not None and count is not None:
                loss = reduce_from_context(loss, self.ctx) / count.float()
                if losses and loss.requires_grad:
                    loss.register_hook(losses.set_scale)
            if collects:
                logits = head.full_outputs(outputs, micro_batch)
        return Output(None if labels is None else loss, logits)

    @on_all_ranks
    def train_batch(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        targets: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        sequence_length: int | None = None,
        num_microbatches: int = 1,
        schedule: str = "1f1b",
        step: int | None = None,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Forward and backward of this replica's batch; returns the mean loss over the global
        batch's labelled tokens.

        Inputs: see `Batch`; stages between the first and the last need none. num_microbatches must
        divide the batch. step: numbers the draw of the dropout masks; by default it counts the
        calls. loss_fn(logits fp32 [rows, sequence, vocabulary], labels as given): a loss of your
        own, on the last stage: the mean of a micro-batch. What is returned, and differentiated, is
        the mean over the global batch: micro-batches weigh as many labelled tokens as they have
        (rows, if the labels are not of tokens); label smoothing and z-loss of the head have no part
        in it. A module's own parameters are yours to step.
        Gradients start from zero; afterwards p.grad holds the gradient of the returned mean, the
        same on all replicas.
        """
        batch = Batch(
            input_ids,
            labels,
            targets,
            attention_mask,
            position_ids,
            document_ids,
            sequence_length,
        )
        return self.engine.train_batch(batch, num_microbatches, schedule, step, loss_fn)

    def microbatches(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        num_microbatches: int = 1,
        **inputs: torch.Tensor,
    ) -> Iterator[Output]:
        """For a custom loop: `for out in model.microbatches(**batch): out.loss.backward()`.

        Yields after each micro-batch's forward. Every rank of the pipeline must go through it to
        its end, and call backward where one does; then p.grad is what `train_batch` leaves there.
        The model stays in the mode that it is in: after from_pretrained, call model.train() first.
        out.loss: the micro-batch's part of the mean that train_batch returns, the same on every
        rank: they add up to it. inputs: as in `train_batch`. One micro-batch is under way at a
        time; train_batch keeps all stages busy.
        """
        given = {"input_ids": input_ids, "labels": labels, **inputs}
        yield from self.engine.microbatches(given, num_microbatches)

    @on_all_ranks
    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Synchronize the gradients after a custom backward, `model(ids,
        labels=ids).loss.backward()`, before the step.

        They become the mean over the replicas, as in torch's DistributedDataParallel. The gradients
        of a parameter that is tied between stages are summed over its copies. (Copies over tp are
        summed in backward.) Every rank calls it, once a step.
        After `train_batch` and `microbatches`, which sum by themselves, it does nothing.
        """
        self.engine.sync_gradients()

    @on_all_ranks
    @torch.no_grad()
    def eval_batch(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        targets: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        sequence_length: int | None = None,
        num_microbatches: int = 1,
        return_count: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The mean loss over the global batch's labelled tokens, without dropout; afterwards each
        module is in the mode that it was in. Arguments as in train_batch.

        return_count: also their number, 0-dimensional fp64: what the batch weighs in a mean over
        several.
        """
        batch = Batch(
            input_ids,
            labels,
            targets,
            attention_mask,
            position_ids,
            document_ids,
            sequence_length,
        )
        result = self.engine.eval_batch(batch, num_microbatches)
        return (result.loss, result.labelled) if return_count else result.loss


@contextmanager
def using_context(model: Any, ctx: ParallelContext) -> Iterator[None]:
    """Within this block a model and its modules have another context, of the same ranks."""
    before = model.ctx
    modules = [m for m in model.modules() if getattr(m, "ctx", None) is before]
    for module in modules:
        module.ctx = ctx
    try:
        yield
    finally:
        for module in modules:
            module.ctx = before


def _refuse_backward(_: float) -> None:
    """Raise UserError: the loss of a pipeline has no backward through the other stages."""
    raise UserError(
        "the loss of model(...) can't go backward through a pipeline: call model.train_batch(...), "
        "or in a loop of your own model.microbatches(...)"
    )
