"""The engine that trains a model: gradient buckets, agreement of all ranks on frozen parameters,
numbering of the dropout draws, and the reductions after the last backward."""

import re
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from megazoo.engine.auxiliary import declared_losses
from megazoo.engine.batch import Batch
from megazoo.engine.microbatch import MicroBatch, Output
from megazoo.engine.pipeline import Result, run_pipeline
from megazoo.engine.stepwise import run_stepwise
from megazoo.errors import UserError, advise
from megazoo.layers.dropout import Dropout, without_dropout
from megazoo.layers.linear import refuse_rounded
from megazoo.parallel.buckets import UNSUMMED, GradientBuckets
from megazoo.parallel.collectives import all_gather_objects, all_reduce, all_reduce_over
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.deferred import AT_ONCE, WeightQueue
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.module import NamedParameter, ShardedModule, sum_over_copies
from megazoo.parallel.p2p import sum_between_stages
from megazoo.parallel.schedule import placement_named_by, schedule_named, splits_backward


class TrainingEngine:
    """Trains one model, which holds it as `model.engine`. It has a weak reference to the model.

    Args:
        model: the model.
        before: the engine of the model that this one is a copy of, or None.

    Attributes:
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
        self._buckets: GradientBuckets | None = None
        self._frozen_ties: set[str] | None = None  # frozen tied parameters, once agreed on
        self._advised = False  # about training in evaluation mode
        self._compared = False  # the first gradients of plain parameters, over tp

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
    ) -> torch.Tensor:
        """Run forward and backward of the batch of a replica; see `Model.train_batch`."""
        if not self.model.training:
            self.model.train()
        self._check_placement(schedule)
        splits = splits_backward(schedule, self.ctx.pp_size, self.ctx.virtual_size)
        buckets = self.buckets_to_train()
        micro_batches = self.micro_batches(batch, num_microbatches, step, loss_fn is not None)
        self._require_labels(micro_batches)
        queue = WeightQueue(buckets.received) if splits else None
        scale = self.loss_scale.value if self.loss_scale else 1.0
        buckets.start(num_microbatches, queue.weights if queue else ())
        try:
            with self.deferred_sums(queue):
                result = run_pipeline(
                    self.model,
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

    def microbatches(self, given: dict[str, Any], num_microbatches: int) -> Iterator[Output]:
        """Yield after the forward of each micro-batch; see `Model.microbatches`."""
        with propagate_errors(self.ctx) as call:
            if call:
                call.agree("microbatches", self.model, {**given, "micro-batches": num_microbatches})
            buckets = self.buckets_to_train()
            batch = Batch(**given)
            micro_batches = self.micro_batches(batch, num_microbatches)
            self._require_labels(micro_batches)
        buckets.start(num_microbatches)
        try:
            scale = self.loss_scale.value if self.loss_scale else 1.0
            with self.deferred_sums(None):
                yield from run_stepwise(self.model, micro_batches, scale)
            with propagate_errors(self.ctx):
                self._finish_gradients(buckets, scale)
        except GeneratorExit:
            with suppress(UserError), propagate_errors(self.ctx):  # others may still be in the loop
                raise UserError(
                    "it left its loop over model.microbatches() before the end"
                ) from None
            raise
        finally:
            buckets.stop()

    def eval_batch(self, batch: Batch, num_microbatches: int) -> Result:
        """Run the forward of the batch of a replica without dropout; see `Model.eval_batch`."""
        with without_dropout(self.model):
            micro_batches = self.micro_batches(batch, num_microbatches)
            self._require_labels(micro_batches)
            return run_pipeline(self.model, micro_batches)

    def sync_gradients(self) -> None:
        """Complete the gradients after a custom backward; see `Model.sync_gradients`."""
        made, buckets = self._buckets is None, self.fit_buckets()
        if made and any(parameter.grad is not None for parameter in buckets.place):
            buckets.fault = UNSUMMED  # from a backward before the hooks existed
        if buckets.fault != UNSUMMED:
            buckets.check()
        pending = torch.tensor(float(buckets.fault == UNSUMMED), device=self.ctx.device)
        all_reduce_over(pending, [self.ctx.pp, self.ctx.token_axis], op=dist.ReduceOp.MAX)
        if pending:
            buckets.fill_missing()
            entries = self.model.trained_entries()
            self._sum_parts([entry for entry in entries if entry.spec.plain])
            self._sum_tied(entries)
            buckets.average()

    def micro_batches(
        self, batch: Batch, count: int, step: int | None = None, own_loss: bool = False
    ) -> list[MicroBatch]:
        """Check the batch of a replica, and split it into `count`. step, own_loss: see
        `train_batch`."""
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

    def _require_labels(self, batches: list[MicroBatch]) -> None:
        if self.model.stages[-1].last and batches[0].targets is None and batches[0].labels is None:
            raise UserError("the last stage needs labels or targets")

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

    @property
    def buckets(self) -> GradientBuckets:
        """The gradient buckets for the trained parameters; see `fit_buckets`."""
        return self._buckets or self.fit_buckets()

    def fit_buckets(self) -> GradientBuckets:
        """Return the gradient buckets, rebuilt if parameters were frozen or unfrozen since they
        were built."""
        entries = self.model.trained_entries()
        if self._buckets is None or not self._buckets.are_of(entry.parameter for entry in entries):
            late = {
                entry.parameter
                for entry in entries
                if len(entry.pp_ranks) > 1
                or entry.name in self.model.used_again
                or entry.spec.has_partial_gradient(self.ctx)
            }
            unsummed = {e.parameter for e in entries if e.spec.plain and e.parameter in late}
            parameters = [entry.parameter for entry in entries]
            axes = {entry.parameter: entry.spec.replicas(self.ctx) for entry in entries}
            buckets = GradientBuckets(parameters, self.ctx, late=late, unsummed=unsummed, axes=axes)
            if self._buckets:
                self._buckets.give_way_to(buckets)
            self._buckets = buckets
        return self._buckets

    def parameters_changed(self) -> None:
        """Note that the model's parameters, or the set of trained ones, have changed. Every rank
        calls it."""
        self._frozen_ties = None
        if self.ctx.mesh is not None and self.ctx.token_axis.size > 1:
            self.fit_buckets()  # they detect a backward whose gradients are not summed

    def buckets_to_train(self) -> GradientBuckets:
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
        return self.fit_buckets()

    def forget_gradients(self) -> None:
        """Note that all gradients were freed or zeroed."""
        if self._buckets:
            self._buckets.forget()

    @contextmanager
    def deferred_sums(self, queue: WeightQueue | None) -> Iterator[None]:
        """Within this block, gradients of copies over tp stay partial: they are summed once for all
        micro-batches.

        queue: delays the gradients of weights that multiply tokens, or None.
        """
        modules = [module for module in self.model.modules() if isinstance(module, ShardedModule)]
        for module in modules:
            module.sums_later, module.weight_queue = True, queue or AT_ONCE
        try:
            yield
        finally:
            for module in modules:
                module.sums_later, module.weight_queue = False, None

    def _finish_gradients(self, buckets: GradientBuckets, loss_scale: float) -> None:
        """Complete the gradients after the last backward.

        First, partial gradients are summed over the tp ranks. Then the gradients of tied parameters
        are summed between their stages. Last, gradients that were not reduced during backward are
        summed over the replicas.
        """
        entries = self.model.trained_entries()
        buckets.fill_missing()
        self._sum_parts(entries)
        self._sum_tied(entries)
        buckets.wait_for_sums(loss_scale)

    def _sum_parts(self, entries: list[NamedParameter]) -> None:
        """Sum the gradients that are partial on each tp rank."""
        partial = [
            (entry.gradient, entry.spec)
            for entry in entries
            if entry.spec.has_partial_gradient(self.ctx)
        ]
        if not self._compared and self.ctx.tp_size > 1:
            self._compared = self._compare_plain(entries)
        sum_over_copies(partial, self.ctx)

    def _compare_plain(self, entries: list[NamedParameter]) -> bool:
        """Raise UserError for a plain parameter with a wrong gradient; return whether these
        gradients can show it.

        The gradients must be equal on the tp ranks. Under sequence parallelism each rank has a
        partial gradient, and equal gradients mean that each rank has computed the full one. If the
        gradients of other modules are also equal, all tokens of the batch are the same and nothing
        can be concluded.
        """
        plain = [entry for entry in entries if entry.spec.plain]
        if not plain:
            return True
        if not self.ctx.sequence_parallel:
            for entry in filter(self._differs, plain):
                raise UserError(
                    f"the gradients of {entry.name} differ between the tp ranks: it is used "
                    "inside a tensor-parallel region, where each rank has other features; create "
                    "it in a ShardedModule, with ParameterSpec(partial=True)"
                )
            return True
        others = (entry for entry in entries if entry.spec.shard is None and not entry.spec.plain)
        if not any(map(self._differs, others)):
            return False
        for entry in plain:
            if entry.gradient.any() and not self._differs(entry):
                raise UserError(
                    f"the gradients of {entry.name} are the same on all tp ranks under sequence "
                    "parallelism: it is used where each rank has the full sequence, and their sum "
                    "would be wrong; use it where each rank has its part, or turn "
                    "sequence_parallel off"
                )
        return True

    def _differs(self, entry: NamedParameter) -> bool:
        """Return whether a parameter's gradients differ between the tp ranks."""
        extremes = torch.stack([entry.gradient, -entry.gradient])
        all_reduce(extremes, self.ctx.tp_group, dist.ReduceOp.MAX)
        return bool(extremes.sum(0).abs().max() > 1e-3 * extremes.abs().max())

    def _sum_tied(self, entries: list[NamedParameter]) -> None:
        for entry in entries:
            if len(entry.pp_ranks) > 1:
                sum_between_stages(entry.gradient, list(entry.pp_ranks), self.ctx)


def _copied(calls: int, loss_scale) -> TrainingEngine:
    """Return the engine of a copied model, before it belongs to the model."""
    engine = TrainingEngine.__new__(TrainingEngine)
    engine._reference, engine.calls, engine.loss_scale = lambda: None, calls, loss_scale
    return engine
