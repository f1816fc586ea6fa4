"""Which parameters of a model are trained: freezing by name."""

import fnmatch
import re
from collections.abc import Callable, Iterator
from typing import Any, Self

from torch import nn

from megazoo.engine.training import TrainingEngine
from megazoo.errors import UserError
from megazoo.models.attachment import Attachment
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import on_all_ranks
from megazoo.parallel.module import NamedParameter


class Freezing(nn.Module):
    """The part of `Model` that knows what is frozen (`requires_grad_(False)`)."""

    config: Any
    ctx: ParallelContext
    attached: Attachment | None
    engine: TrainingEngine
    entries: Callable[[], Iterator[NamedParameter]]
    on_meta: Callable[..., Any]

    def trained_entries(self) -> list[NamedParameter]:
        """List this rank's parameters that are not frozen (`requires_grad_(False)`): those that
        have gradients."""
        return [entry for entry in self.entries() if entry.parameter.requires_grad]

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Return the number of parameters of the whole model, of all its stages and shards; a tied
        one counts once. Adapters are included, modules that were added to the model are not.

        only_trainable: count only those that no rank has frozen; a collective call.
        """
        frozen = self._frozen_names() if only_trainable else set()
        return sum(e.parameter.numel() for e in self._whole().entries() if e.name not in frozen)

    @on_all_ranks
    def _frozen_names(self) -> set[str]:
        """Return the names of the parameters that any rank has frozen."""
        frozen = {e.name for e in self.entries() if not e.parameter.requires_grad}
        return frozen.union(*all_gather_objects(frozen, self.ctx))

    def train_only(self, pattern: str) -> Self:
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

    def freeze(self, pattern: str) -> Self:
        """Freeze the parameters whose global name matches the pattern, as in `train_only`; returns
        self."""
        frozen = self._names_matching(pattern)
        for entry in self.entries():
            if entry.name in frozen:
                entry.parameter.requires_grad_(False)
        return self

    def _names_matching(self, pattern: str) -> set[str]:
        """Find the parameters of the whole model, in whatever stage, whose names match."""
        return names_matching(pattern, [entry.name for entry in self._whole().entries()])

    def _whole(self) -> Any:
        """Make the whole model on the meta device, with what is attached to this one."""
        whole = self.on_meta(self.config, ParallelContext())
        if self.attached:
            self.attached.attach(whole)
        return whole

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free all gradients, or zero them in place."""
        super().zero_grad(set_to_none)
        self.engine.forget_gradients()


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
