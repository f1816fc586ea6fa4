"""Which parameters of a model are trained: freezing by name, the agreement of all ranks on what is
frozen, and the gradient buckets that fit."""

import fnmatch
import re

from megazoo.errors import UserError
from megazoo.layers.linear import refuse_rounded
from megazoo.models.adapters import attach, is_adapter
from megazoo.parallel.buckets import GradientBuckets
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import NamedParameter


class Freezing:
    """The part of `Model` that knows what is frozen (`requires_grad_(False)`)."""

    _buckets: GradientBuckets | None = None
    # names of tied parameters that are frozen, once ranks agreed
    _frozen_ties: set[str] | None = None
    # the first stage of the pipeline that trains anything: those before it need no gradient
    first_trained_stage = 0

    def trained_entries(self) -> list[NamedParameter]:
        """List this rank's parameters that are not frozen (`requires_grad_(False)`): those that
        have gradients."""
        return [entry for entry in self.entries() if entry.parameter.requires_grad]

    def saved_entries(self) -> list[NamedParameter]:
        """List this rank's parameters that a checkpoint holds: all; of a model with adapters these,
        and what else is not frozen."""
        return [
            entry
            for entry in self.entries()
            if not self.lora or is_adapter(entry.name) or entry.parameter.requires_grad
        ]

    def train_only(self, pattern: str) -> "Freezing":
        """Freeze every parameter whose global name does not match the pattern; returns self.

        pattern: a regular expression that is searched for in the names, such as "head|norm" or
        "layers[.](10|11)[.]"; or, where it is none, a glob of whole names, such as "*norm*". Call
        it before the optimizer is made. UserError, with the names there are, if it matches nothing
        in the whole model.
        """
        trained = self._names_matching(pattern)
        for entry in self.entries():
            entry.parameter.requires_grad_(entry.name in trained)
        return self

    def freeze(self, pattern: str) -> "Freezing":
        """Freeze the parameters whose global name matches the pattern, as in `train_only`; returns
        self."""
        frozen = self._names_matching(pattern)
        for entry in self.entries():
            if entry.name in frozen:
                entry.parameter.requires_grad_(False)
        return self

    def _names_matching(self, pattern: str) -> set[str]:
        """Find the parameters of the whole model, in whatever stage, whose names match."""
        whole = self.on_meta(self.config, ParallelContext())
        if self.lora:
            attach(whole, self.lora)
        return names_matching(pattern, [entry.name for entry in whole.entries()])

    def agree_on_frozen(self) -> None:
        """Freeze on every rank what any rank has frozen its part or copy of; all ranks call it
        together.

        A tied parameter of which one stage's copy learned and the other's did not would be two.
        AdamW calls it, and the first batch that is trained on. UserError if nothing is left to
        train.
        """
        entries = list(self.entries())
        frozen = {entry.name for entry in entries if not entry.parameter.requires_grad}
        told = [(frozen, len(entries), self.first_trained_here())]
        if self.ctx.mesh is not None:
            told = all_gather_objects(told[0], self.ctx)
        if all(len(names) == count for names, count, _ in told):
            refuse_rounded(self, "trained")
            raise UserError("every parameter is frozen: there is nothing to train")
        frozen = set().union(*(names for names, _, _ in told))
        for entry in entries:
            if entry.name in frozen:
                entry.parameter.requires_grad_(False)
        self.first_trained_stage = min(first for _, _, first in told)
        self._frozen_ties = self._tied_and_frozen()

    def first_trained_here(self) -> int:
        """Return the index of this rank's first stage with a parameter that is trained; the number
        of all stages if there is none.

        What belongs to no layer is the first or the last stage's; where a rank has neither, it may
        be of any.
        """
        found = [re.match(r"layers\.(\d+)\.", entry.name) for entry in self.trained_entries()]
        layers = {int(match[1]) for match in found if match}
        trained = [stage.index for stage in self.stages if layers & set(stage.layers)]
        if not all(found):
            ends = [stage.index for stage in self.stages if stage.first or stage.last]
            trained += ends[:1] or [self.stages[0].index]
        return min(trained, default=self.ctx.stage_count)

    def _tied_and_frozen(self) -> set[str]:
        return {
            entry.name
            for entry in self.entries()
            if len(entry.pp_ranks) > 1 and not entry.parameter.requires_grad
        }

    @property
    def gradient_buckets(self) -> GradientBuckets:
        """What sums the gradients over the replicas, made for the parameters that are not frozen;
        see `fit_buckets`."""
        return self._buckets or self.fit_buckets()

    def fit_buckets(self) -> GradientBuckets:
        """Make the gradient buckets anew if parameters were frozen or unfrozen since they were
        made; returns them."""
        entries = self.trained_entries()
        if self._buckets is None or not self._buckets.are_of(entry.parameter for entry in entries):
            late = {
                entry.parameter
                for entry in entries
                if len(entry.pp_ranks) > 1 or entry.spec.has_partial_gradient(self.ctx)
            }
            unsummed = {e.parameter for e in entries if e.spec.plain and e.parameter in late}
            parameters = [entry.parameter for entry in entries]
            buckets = GradientBuckets(parameters, self.ctx, late=late, unsummed=unsummed)
            if self._buckets:
                self._buckets.give_way_to(buckets)
            self._buckets = buckets
        return self._buckets

    def parameters_changed(self) -> None:
        """Note that the model has other parameters than before, or others that are trained. Every
        rank calls it."""
        self._frozen_ties = None
        if self.ctx.mesh is not None and self.ctx.token_axis.size > 1:
            self.fit_buckets()  # they notice a backward whose gradients nobody sums

    def buckets_to_train(self) -> GradientBuckets:
        """Fit the gradient buckets, once all ranks agree on what is frozen."""
        self._advise_of_mode()
        if self._frozen_ties is None:
            self.agree_on_frozen()
        if self._tied_and_frozen() != self._frozen_ties:
            raise UserError(
                "a tied parameter was frozen or unfrozen after training began: make a new "
                "megazoo.optim.AdamW, or call model.agree_on_frozen() on every rank"
            )
        if self.first_trained_here() < self.first_trained_stage:  # it would get no gradient
            raise UserError(
                "a parameter before all that are trained was unfrozen after training began: make a "
                "new megazoo.optim.AdamW, or call model.agree_on_frozen() on every rank"
            )
        return self.fit_buckets()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free all gradients, or zero them in place."""
        super().zero_grad(set_to_none)
        if self._buckets:
            self._buckets.forget()


def names_matching(pattern: str, names: list[str]) -> set[str]:
    """Return the names that have a regular expression in them, or that a glob fits whole; UserError
    if there are none.

    What is not a regular expression, as "*norm*", is a glob.
    """
    wrong = ""
    try:
        found = {name for name in names if re.search(pattern, name)}
    except re.error as error:
        found = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
        wrong = f", and is no regular expression ({error})"
    if not found:
        kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in names)
        raise UserError(
            f"the pattern {pattern!r} matches no parameter{wrong}; there are {', '.join(kinds)}"
        )
    return found
