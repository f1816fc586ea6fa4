"""The engine that trains a model: it runs batches, numbers the dropout draws, and lets all ranks
agree on the frozen parameters."""

import re
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from megazoo.engine.auxiliary import declared_losses
from megazoo.engine.batch import Batch
from megazoo.engine.gradients import GradientSums
from megazoo.engine.microbatch import MicroBatch, Output
from megazoo.engine.pipeline import Result, run_pipeline
from megazoo.engine.stepwise import run_stepwise
from megazoo.errors import UserError, advise
from megazoo.layers.dropout import Dropout, without_dropout
from megazoo.layers.linear import refuse_rounded
from megazoo.parallel.buckets import GradientBuckets
from megazoo.parallel.collectives import (
    all_gather_objects,
    all_reduce,
    broadcast_from_stage,
)
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.deferred import WeightQueue
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.schedule import placement_named_by, schedule_named, splits_backward


class TrainingEngine:
    """Trains one model, which holds it as `model.engine`. It has a weak reference to the model.

    Args:
        model: the model.
        before: the engine of the model that this one is a copy of, or None.

    Attributes:
        gradients: completes the gradients.
        optimizers: of megazoo, which keep fp32 masters of the weights.
        calls: number of batches in training mode, from which dropout masks are drawn.
        loss_scale: the LossScale of float16, set by the optimizer.
        first_trained_stage: index of the first pipeline stage with trained parameters. Earlier
            stages need no gradients.
        auxiliary_losses: means over the last global batch, 0-dimensional fp32, by the names in
            auxiliary_names.
        auxiliary_names: the auxiliary losses that layers of any rank declare: see
            `declared_losses`.
    """

    def __init__(self, model, before: "TrainingEngine | None" = None):
        self._reference: Callable[[], Any] = weakref.ref(model)
        self.calls = before.calls if before else 0
        self.loss_scale = before.loss_scale if before else None
        self.first_trained_stage = 0
        self.auxiliary_losses: dict[str, torch.Tensor] = {}
        self.auxiliary_names: dict[str, int] | None = None
        self._loss_metrics: tuple[tuple[str, ...], torch.Tensor] = (), torch.zeros(0)
        self.gradients = GradientSums(self._reference)
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._frozen_ties: set[str] | None = None  # frozen tied parameters, once agreed on
        self._advised = False  # about training in evaluation mode

    def __reduce__(self):
        return _copied, (self.calls, self.loss_scale)

    @property
    def model(self) -> Any:
        """The model; None for the engine of a model that was copied, until it has its own."""
        return self._reference()

    @property
    def ctx(self) -> ParallelContext:
        return self.model.ctx

    def train_batch(
        self,
        batch: Batch,
        num_microbatches: int,
        schedule: str,
        step: int | None,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
        loss: Any = None,
    ) -> torch.Tensor:
        """Run forward and backward of the batch of a replica; see `Model.train_batch`."""
        if not self.model.training:
            self.model.train()
        self._check_placement(schedule)
        splits = splits_backward(schedule, self.ctx.pp_size, self.ctx.virtual_size)
        buckets = self.checked_buckets()
        if loss is not None and loss_fn is not None:
            raise UserError("loss and loss_fn exclude each other: use one of them")
        own_loss = loss_fn is not None
        micro_batches = self.micro_batches(batch, num_microbatches, step, own_loss, loss)
        head = loss.bound(self.model.output_head) if loss and self.model.has_last else None
        self.require_labels(micro_batches)
        queue = WeightQueue(buckets.received) if splits else None
        scale = self.loss_scale.value if self.loss_scale else 1.0
        # With one stage and whole backwards, each backward of this rank adds to all gradients.
        often = queue is None and len(self.model.stages) == 1
        with self.gradients.of_batch(num_microbatches, queue, often):
            result = run_pipeline(
                self.model,
                micro_batches,
                schedule_named(schedule),
                loss_fn=loss_fn,
                head=head,
                loss_scale=scale,
                weight_queue=queue,
            )
            self.gradients.complete(scale)
        self._note_metrics(loss, head, result)
        return result.loss

    def microbatches(self, given: dict[str, Any], num_microbatches: int) -> Iterator[Output]:
        """Yield after the forward of each micro-batch; see `Model.microbatches`."""
        with propagate_errors(self.ctx) as call:
            if call:
                call.agree("microbatches", self.model, {**given, "micro-batches": num_microbatches})
            self.checked_buckets()
            batch = Batch(**given)
            micro_batches = self.micro_batches(batch, num_microbatches)
            self.require_labels(micro_batches)
        try:
            scale = self.loss_scale.value if self.loss_scale else 1.0
            with self.gradients.of_batch(num_microbatches):
                yield from run_stepwise(self.model, micro_batches, scale)
                with propagate_errors(self.ctx):
                    self.gradients.complete(scale)
        except GeneratorExit:
            with suppress(UserError), propagate_errors(self.ctx):  # others may still be in the loop
                raise UserError(
                    "it left its loop over model.microbatches() before the end"
                ) from None
            raise

    def eval_batch(self, batch: Batch, num_microbatches: int, loss: Any = None) -> Result:
        """Run the forward of the batch of a replica without dropout; see `Model.eval_batch`."""
        with without_dropout(self.model):
            micro_batches = self.micro_batches(batch, num_microbatches, loss=loss)
            self.require_labels(micro_batches)
            head = loss.bound(self.model.output_head) if loss and self.model.has_last else None
            result = run_pipeline(self.model, micro_batches, head=head)
            self._note_metrics(loss, head, result)
            return result

    @property
    def loss_metrics(self) -> dict[str, float]:
        """Return the means over the last global batch of the metrics of its loss, by name. Reading
        them waits for a GPU."""
        names, means = self._loss_metrics
        return dict(zip(names, means.tolist(), strict=True))

    def _note_metrics(self, loss: Any, head: Any, result: Result) -> None:
        """Store the means of the metrics of a loss, for `loss_metrics`. head: the loss with the
        head of this rank's last stage, or None."""
        names = loss.metrics if loss else ()
        self._loss_metrics = (), torch.zeros(0)
        if names:
            totals = torch.zeros(len(names), dtype=torch.float64, device=self.ctx.device)
            if head and head.totals is not None:
                totals += head.totals
            all_reduce(totals, self.ctx.token_axis.group)
            totals = broadcast_from_stage(totals, self.ctx.placement.last_rank, self.ctx)
            self._loss_metrics = names, totals / result.labelled.clamp(min=1)

    def micro_batches(
        self,
        batch: Batch,
        count: int,
        step: int | None = None,
        own_loss: bool = False,
        loss: Any = None,
    ) -> list[MicroBatch]:
        """Check the batch of a replica, and split it into `count`. step, own_loss, loss: see
        `train_batch`."""
        if loss is not None and (isinstance(loss, type) or not hasattr(loss, "bound")):
            raise UserError(f"loss must be a megazoo.losses.Loss, such as DPO(), not {loss!r}")
        self.ctx.require_ranks()
        self.calls += self.model.training
        return batch.micro_batches(
            count,
            self.ctx,
            self.model.task,
            longest=self.model.longest_sequence(self.model.config),
            own_loss=own_loss,
            seed=self.model.seed,
            step=self.calls if step is None else step,
            loss=loss,
        )

    def _advise_of_mode(self) -> None:
        """Warn once if a model is trained in evaluation mode."""
        if self.model.training or self._advised:
            return
        self._advised = True
        dropouts = (each for each in self.model.modules() if isinstance(each, Dropout))
        if any(dropout.probability for dropout in dropouts):
            advise(
                "the model is trained in evaluation mode, without dropout: call model.train() to "
                "turn it on"
            )
        head = self.model.output_head if self.model.has_last else None
        if getattr(head, "label_smoothing", 0) or getattr(head, "z_loss", 0):
            advise(
                "the model is trained in evaluation mode, without label smoothing and z-loss: call "
                "model.train() to turn them on"
            )

    def _check_placement(self, schedule: str) -> None:
        """Raise UserError if a schedule needs another placement of the stages than the model
        has."""
        needed, found = placement_named_by(schedule), self.ctx.placement.name
        if needed != found:
            raise UserError(
                f"schedule {schedule} needs placement {needed}, but the model's context has "
                f"{found}: create the context with schedule={schedule!r}, or use another schedule"
            )

    def require_labels(self, batches: list[MicroBatch]) -> None:
        if self.model.stages[-1].last and batches[0].targets is None and batches[0].labels is None:
            raise UserError("the last stage needs labels or targets")

    def weights_read(self, *sources: Any) -> None:
        """Note the sources (megazoo/checkpoint/source.py) that the weights were read from, the last
        one read last. The fp32 masters of existing optimizers take the values."""
        self.model.read_from = sources
        for optimizer in list(self.optimizers) if sources else ():
            optimizer.masters.refresh(optimizer, sources)

    def agree_on_frozen(self) -> None:
        """Freeze on every rank the parameters that any rank has frozen. All ranks call it together.

        Otherwise the copies of a tied parameter could differ, if only one stage trains its copy.
        AdamW calls it, and the first training batch. UserError if all parameters are frozen.
        """
        entries = list(self.model.entries())
        frozen = {entry.name for entry in entries if not entry.parameter.requires_grad}
        self.auxiliary_names = declared_losses(self.model)
        of_ranks = [(frozen, len(entries), self.first_trained_here(), self.auxiliary_names)]
        if self.ctx.mesh is not None:
            of_ranks = all_gather_objects(of_ranks[0], self.ctx)
        if all(len(names) == count for names, count, *_ in of_ranks):
            refuse_rounded(self.model, "trained")
            raise UserError("every parameter is frozen: there is nothing to train")
        frozen = set().union(*(names for names, *_ in of_ranks))
        for entry in entries:
            if entry.name in frozen:
                entry.parameter.requires_grad_(False)
        self.first_trained_stage = min(first for _, _, first, _ in of_ranks)
        declared = [names for *_, names in of_ranks if names is not None]
        self.auxiliary_names = dict(ChainMap(*declared)) if declared else None
        self._frozen_ties = self._tied_and_frozen()

    def first_trained_here(self) -> int:
        """Return the index of this rank's first stage with a trained parameter, or the number of
        all stages.

        Parameters outside of layers belong to the first or the last stage. If a rank has neither,
        they may belong to any of its stages.
        """
        found = [re.match(r"layers\.(\d+)\.", entry.name) for entry in self.model.trained_entries()]
        layers = {int(match[1]) for match in found if match}
        trained = [stage.index for stage in self.model.stages if layers & set(stage.layers)]
        if not all(found):
            ends = [stage.index for stage in self.model.stages if stage.first or stage.last]
            trained += ends[:1] or [self.model.stages[0].index]
        return min(trained, default=self.ctx.stage_count)

    def _tied_and_frozen(self) -> set[str]:
        return {
            entry.name
            for entry in self.model.entries()
            if len(entry.pp_ranks) > 1 and not entry.parameter.requires_grad
        }

    def parameters_changed(self) -> None:
        """Note that the model's parameters, or the set of trained ones, have changed. Every rank
        calls it."""
        self._frozen_ties = None
        if self.ctx.mesh is not None and self.ctx.token_axis.size > 1:
            self.gradients.fit()  # they detect a backward whose gradients are not summed

    def checked_buckets(self) -> GradientBuckets:
        """Return the gradient buckets, after all ranks agree on the frozen parameters."""
        self._advise_of_mode()
        if self._frozen_ties is None:
            self.agree_on_frozen()
        if self._tied_and_frozen() != self._frozen_ties:
            raise UserError(
                "a tied parameter was frozen or unfrozen after training began: create a new "
                "megazoo.optim.AdamW, or call model.engine.agree_on_frozen() on every rank"
            )
        if self.first_trained_here() < self.first_trained_stage:  # it would get no gradient
            raise UserError(
                "a parameter before the first trained one was unfrozen after training began: "
                "create a new megazoo.optim.AdamW, or call model.engine.agree_on_frozen() on every "
                "rank"
            )
        return self.gradients.fit()

    def forget_gradients(self) -> None:
        """Note that all gradients were freed or zeroed."""
        if self.gradients.made:
            self.gradients.made.forget()


def _copied(calls: int, loss_scale) -> TrainingEngine:
    """Return the engine of a copied model, before it belongs to the model."""
    engine = TrainingEngine.__new__(TrainingEngine)
    engine._reference, engine.calls, engine.loss_scale = lambda: None, calls, loss_scale
    return engine
