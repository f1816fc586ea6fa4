"""The sums that make a gradient."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megazoo.errors import UserError
from megazoo.parallel.buckets import UNSUMMED, GradientBuckets
from megazoo.parallel.collectives import all_reduce, all_reduce_over
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.deferred import AT_ONCE, WeightQueue
from megazoo.parallel.module import NamedParameter, ShardedModule, sum_over_copies
from megazoo.parallel.p2p import sum_between_stages
from megazoo.parallel.storage import storage_of


def summed_last(model: Any) -> set[torch.nn.Parameter]:
    """Return this rank's parameters whose gradients are incomplete after the last backward."""
    return {
        entry.parameter
        for entry in model.entries()
        if len(entry.pp_ranks) > 1
        or entry.name in model.used_again
        or entry.spec.has_partial_gradient(model.ctx)
    }


class GradientSums:
    """Completes the gradients of a model. Each is the result of up to four sums, in this order:

    1. over the micro-batches, in backward;
    2. over the tp ranks, if each has a part (`ParameterSpec.has_partial_gradient`);
    3. over the stages, if they share a tied parameter;
    4. over the replicas, in buckets. Those of parameters without sums 2 and 3 start in the last
       backward.

    find_model: returns the model.

    Attributes:
        made: the buckets, once they are needed.

    Layers may already have summed over a folded axis in backward, as experts do.
    """

    def __init__(self, find_model: Callable[[], Any]):
        self._find_model = find_model
        self.made: GradientBuckets | None = None
        self._compared = False  # the first gradients of plain parameters, over tp

    @property
    def model(self) -> Any:
        """The model."""
        return self._find_model()

    @property
    def ctx(self) -> ParallelContext:
        """The context of the model."""
        return self.model.ctx

    @property
    def buckets(self) -> GradientBuckets:
        """The gradient buckets for the trained parameters; see `fit`."""
        return self.made or self.fit()

    def fit(self) -> GradientBuckets:
        """Return the gradient buckets, rebuilt if parameters were frozen or unfrozen since they
        were built."""
        entries = self.model.trained_entries()
        if self.made is None or not self.made.are_of(entry.parameter for entry in entries):
            summed = summed_last(self.model)
            plain = {entry.parameter for entry in entries if entry.spec.plain}
            unsummed = plain & summed
            late = summed | plain if self.ctx.tp_size > 1 else summed  # plain ones are compared
            parameters = [entry.parameter for entry in entries]
            axes = {entry.parameter: entry.spec.replicas(self.ctx) for entry in entries}
            storage = storage_of(self.model)
            buckets = GradientBuckets(
                parameters,
                self.ctx,
                late=late,
                unsummed=unsummed,
                axes=axes,
                flats=storage.every_flat() if storage else (),
            )
            if self.made:
                self.made.give_way_to(buckets)
            self.made = buckets
        return self.made

    @contextmanager
    def of_batch(
        self, backwards: int, queue: WeightQueue | None = None, often: bool = False
    ) -> Iterator[None]:
        """Within this block, the gradients of a batch are computed by `backwards` backwards per
        stage, and then completed with `complete`. queue: see `deferred`. often: see
        `GradientBuckets.start`."""
        buckets = self.fit()
        buckets.start(backwards, queue.weights if queue else (), often)
        try:
            with self.deferred(queue):
                yield
        finally:
            buckets.stop()

    def complete(self, loss_scale: float = 1.0) -> None:
        """Complete the gradients after the last backward, and divide them by a loss scale."""
        entries = self.model.trained_entries()
        self.buckets.fill_missing()
        self._sum_parts(entries)
        self._sum_tied(entries)
        self.buckets.wait_for_sums(loss_scale)

    def complete_custom(self) -> None:
        """Complete the gradients after a custom backward; see `Model.sync_gradients`."""
        are_new, buckets = self.made is None, self.fit()
        if are_new and any(parameter.grad is not None for parameter in buckets.place):
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

    @contextmanager
    def deferred(self, queue: WeightQueue | None) -> Iterator[None]:
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
        others = (
            entry
            for entry in entries
            if entry.spec.shard is None
            and not entry.spec.plain
            and entry.parameter.grad is not None
        )
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
