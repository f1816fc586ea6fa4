"""The calls that run batches: a forward, a training step, an evaluation, and what has to follow the
last backward. A model inherits them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from megazoo.engine.batch import Batch
from megazoo.engine.microbatch import MicroBatch, Output
from megazoo.engine.pipeline import count_labels, run_pipeline
from megazoo.engine.stepwise import run_stepwise, with_backward
from megazoo.errors import UserError, advise
from megazoo.parallel.agreement import Terms
from megazoo.parallel.buckets import UNSUMMED, GradientBuckets
from megazoo.parallel.collectives import all_reduce, all_reduce_over
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.deferred import AT_ONCE, WeightQueue
from megazoo.parallel.failure import on_all_ranks, on_replica_ranks, propagate_errors
from megazoo.parallel.module import NamedParameter, ShardedModule, sum_over_copies
from megazoo.parallel.p2p import sum_between_stages
from megazoo.parallel.regions import reduce_from_context
from megazoo.parallel.schedule import schedule_named, splits_backward


class TrainingStep:
    """The part of `Model` that runs batches. It asks the rest for its config, context, stages,
    entries, task and gradient buckets."""

    _calls = 0  # that trained: the draw of dropout masks is numbered by them
    _advised = False  # of training in evaluation mode
    _compared = False  # the first gradients of plain parameters, over tp
    loss_scale = None  # of float16: a LossScale, which its optimizer makes

    def terms(self) -> Terms:
        """Return what ranks that call this model together have alike."""
        settings = {"family": self.family, "seed": self.seed, "training mode": self.training}
        terms = Terms(rows={"the number of training calls": self._calls})  # dropout is drawn by it
        terms.take({f"the model's {name}": value for name, value in settings.items()})
        terms.take_config(self.config)
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
        (micro_batch,) = self.micro_batches(batch, 1)
        together = self.ctx.pp_size * self.ctx.tp_size * self.ctx.cp_size == 1
        whole = self.num_labels or together
        collect = self.full_logits if return_logits or labels is None or whole else None
        if self.ctx.pp_size > 1:
            result = run_pipeline(self, [micro_batch], global_batch=False, collect=collect)
            loss, logits = with_backward(result.loss, _refuse_backward), result.collected
        else:
            x = self.forward_stage(micro_batch.input_ids, micro_batch, self.stages[0])
            outputs, loss, logits = self.outputs(x, micro_batch), None, None
            if labels is not None:
                count = count_labels(self, [micro_batch], self.ctx.cp_group).clamp(min=1)
                loss = self.loss_of(x, micro_batch, outputs=outputs)
                loss = reduce_from_context(loss, self.ctx) / count.float()
            if collect:
                logits = collect(outputs, micro_batch)
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
        (rows, if the labels are not of tokens). A module's own parameters are yours to step.
        Gradients start from zero; afterwards p.grad holds the gradient of the returned mean, the
        same on all replicas.
        """
        splits = splits_backward(schedule, self.ctx.pp_size, self.ctx.virtual_size)
        buckets = self.buckets_to_train()
        batch = Batch(
            input_ids,
            labels,
            targets,
            attention_mask,
            position_ids,
            document_ids,
            sequence_length,
        )
        micro_batches = self.micro_batches(batch, num_microbatches, step, loss_fn is not None)
        self._require_labels(micro_batches)
        queue = WeightQueue(buckets.received) if splits else None
        scale = self.loss_scale.value if self.loss_scale else 1.0
        buckets.start(num_microbatches, queue.weights if queue else ())
        try:
            with self.deferred_sums(queue):
                result = run_pipeline(
                    self,
                    micro_batches,
                    schedule_named(schedule),
                    loss_fn=loss_fn,
                    loss_scale=scale,
                    weight_queue=queue,
                )
            self._finish_gradients(buckets, scale)
        finally:
            buckets.stop()
        return result.loss

    def microbatches(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        num_microbatches: int = 1,
        **inputs: torch.Tensor,
    ) -> Iterator[Output]:
        """For a loop of your own: `for out in model.microbatches(**batch): out.loss.backward()`.

        Yields after each micro-batch's forward. Every rank of the pipeline must go through it to
        its end, and call backward where one does; then p.grad is what `train_batch` leaves there.
        out.loss: the micro-batch's part of the mean that train_batch returns, the same on every
        rank: they add up to it. inputs: as there. One micro-batch is under way at a time;
        train_batch keeps all stages busy.
        """
        given = {"input_ids": input_ids, "labels": labels, **inputs}
        with propagate_errors(self.ctx) as call:
            if call:
                call.agree("microbatches", self, {**given, "micro-batches": num_microbatches})
            buckets = self.buckets_to_train()
            batch = Batch(**given)
            micro_batches = self.micro_batches(batch, num_microbatches)
            self._require_labels(micro_batches)
        buckets.start(num_microbatches)
        try:
            scale = self.loss_scale.value if self.loss_scale else 1.0
            with self.deferred_sums(None):
                yield from run_stepwise(self, micro_batches, scale)
            with propagate_errors(self.ctx):
                self._finish_gradients(buckets, scale)
        except GeneratorExit:
            with suppress(UserError), propagate_errors(self.ctx):  # others may still be in the loop
                raise UserError("it left its loop over model.microbatches()") from None
            raise
        finally:
            buckets.stop()

    @on_all_ranks
    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Make gradients whole after a backward of your own, `model(ids,
        labels=ids).loss.backward()`, before the step.

        They become the mean over the replicas of each one's gradient, as torch's
        DistributedDataParallel has it; those of a parameter that is tied between stages, the sum of
        its copies'. (Copies over tp are summed in backward.) Every rank calls it, once a step.
        After `train_batch` and `microbatches`, which sum by themselves, it does nothing.
        """
        made, buckets = self._buckets is None, self.fit_buckets()
        if made and any(parameter.grad is not None for parameter in buckets.place):
            buckets.fault = UNSUMMED  # of a backward that no hook has seen
        if buckets.fault != UNSUMMED:
            buckets.check()
        pending = torch.tensor(float(buckets.fault == UNSUMMED), device=self.ctx.device)
        all_reduce_over(pending, [self.ctx.pp, self.ctx.token_axis], op=dist.ReduceOp.MAX)
        if pending:
            buckets.fill_missing()
            entries = self.trained_entries()
            self._sum_parts([entry for entry in entries if entry.spec.plain])
            self._sum_tied(entries)
            buckets.average()

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
        """The mean loss over the global batch's labelled tokens, without dropout. Arguments as in
        train_batch.

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
        with self.without_dropout():
            micro_batches = self.micro_batches(batch, num_microbatches)
            self._require_labels(micro_batches)
            result = run_pipeline(self, micro_batches)
        return (result.loss, result.labelled) if return_count else result.loss

    def micro_batches(
        self, batch: Batch, count: int, step: int | None = None, own_loss: bool = False
    ) -> list[MicroBatch]:
        """Check a replica's batch, and cut it into `count`. step, own_loss: see `train_batch`."""
        self.ctx.require_ranks()
        self._calls += self.training
        return batch.micro_batches(
            count,
            self.ctx,
            self.task,
            longest=self.longest_sequence(self.config),
            own_loss=own_loss,
            seed=self.seed,
            step=self._calls if step is None else step,
        )

    def _advise_of_mode(self) -> None:
        """Say once that a model is trained whose dropout is off."""
        if self.training or self._advised:
            return
        self._advised = True
        if any(getattr(module, "probability", 0) for module in self.modules()):
            advise(
                "the model is trained in evaluation mode, without its dropout: model.train() turns "
                "it on"
            )

    def _require_labels(self, batches: list[MicroBatch]) -> None:
        if self.stages[-1].last and batches[0].targets is None and batches[0].labels is None:
            raise UserError("the last stage needs labels or targets")

    @contextmanager
    def without_dropout(self):
        """Within this block every module is in evaluation mode; afterwards each is as it was."""
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    @contextmanager
    def using_context(self, ctx: ParallelContext):
        """Within this block the model and its modules have another context, of the same ranks."""
        before = self.ctx
        modules = [m for m in self.modules() if getattr(m, "ctx", None) is before]
        for module in modules:
            module.ctx = ctx
        try:
            yield
        finally:
            for module in modules:
                module.ctx = before

    @contextmanager
    def deferred_sums(self, queue: WeightQueue | None):
        """Within this block gradients of copies over tp stay partial: they are summed once for all
        micro-batches.

        queue: where the gradients of linear weights wait, if they do.
        """
        modules = [module for module in self.modules() if isinstance(module, ShardedModule)]
        for module in modules:
            module.sums_later, module.weight_queue = True, queue or AT_ONCE
        try:
            yield
        finally:
            for module in modules:
                module.sums_later, module.weight_queue = False, None

    def _finish_gradients(self, buckets: GradientBuckets, loss_scale: float) -> None:
        """Make the gradients whole after the last backward.

        In this order: parts of a gradient are summed over the tp ranks; a tied parameter's
        gradients between its stages; then, over the replicas, what has not been summed during
        backward.
        """
        entries = self.trained_entries()
        buckets.fill_missing()
        self._sum_parts(entries)
        self._sum_tied(entries)
        buckets.wait_for_sums(loss_scale)

    def _sum_parts(self, entries: list[NamedParameter]) -> None:
        """Sum the gradients of which each tp rank has a part."""
        partial = [
            (entry.parameter.grad, entry.spec)
            for entry in entries
            if entry.spec.has_partial_gradient(self.ctx)
        ]
        if not self._compared and self.ctx.tp_size > 1:
            self._compared = self._compare_plain(entries)
        sum_over_copies(partial, self.ctx)

    def _compare_plain(self, entries: list[NamedParameter]) -> bool:
        """Raise UserError for a plain parameter whose gradient would be wrong; return whether these
        gradients can show it.

        The gradients must be equal on the tp ranks. Under sequence parallelism each rank has a part
        of a sum, and equal parts mean that each rank has computed the whole. A batch for which the
        gradients of other modules are equal, too, shows nothing: its tokens are all the same.
        """
        plain = [entry for entry in entries if entry.spec.plain]
        if not plain:
            return True
        if not self.ctx.sequence_parallel:
            for entry in filter(self._differs, plain):
                raise UserError(
                    f"the gradients of {entry.name} differ between the tp ranks: it is used "
                    "inside a tensor-parallel region, where each rank has other features; make it "
                    "by a ShardedModule, whose ParameterSpec says partial=True"
                )
            return True
        others = (entry for entry in entries if entry.spec.shard is None and not entry.spec.plain)
        if not any(map(self._differs, others)):
            return False
        for entry in plain:
            if entry.parameter.grad.any() and not self._differs(entry):
                raise UserError(
                    f"the gradients of {entry.name} are the same on all tp ranks under sequence "
                    "parallelism: it is used where each rank has the whole sequence, and they "
                    "would be summed; use it where each has its part, or turn "
                    "sequence_parallel off"
                )
        return True

    def _differs(self, entry: NamedParameter) -> bool:
        """Return whether a parameter's gradients differ between the tp ranks."""
        extremes = torch.stack([entry.parameter.grad, -entry.parameter.grad])
        all_reduce(extremes, self.ctx.tp_group, dist.ReduceOp.MAX)
        return (extremes.sum(0).abs().max() > 1e-3 * extremes.abs().max()).item()

    def _sum_tied(self, entries: list[NamedParameter]) -> None:
        for entry in entries:
            if len(entry.pp_ranks) > 1:
                sum_between_stages(entry.parameter.grad, list(entry.pp_ranks), self.ctx)


def _refuse_backward(_: float) -> None:
    """The backward of a pipeline's loss: one stage alone has no way back to the others."""
    raise UserError(
        "the loss of model(...) can't go backward through a pipeline: call model.train_batch(...), "
        "or in a loop of your own model.microbatches(...)"
    )
