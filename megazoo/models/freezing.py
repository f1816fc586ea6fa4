"""The methods of `Model` that select which parameters are trained."""

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
    """The part of `Model` that freezes parameters (`requires_grad_(False)`)."""

    config: Any
    ctx: ParallelContext
    attached: Attachment | None
    engine: TrainingEngine
    entries: Callable[[], Iterator[NamedParameter]]
    on_meta: Callable[..., Any]

    def trained_entries(self) -> list[NamedParameter]:
        """Return this rank's parameters that are not frozen."""
        entries = (entry for entry in self.entries() if not entry.spec.is_state)
        return [entry for entry in entries if entry.parameter.requires_grad]

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Return the number of parameters of the complete model, over all stages and shards.

        A tied parameter counts once. Adapters are included; custom modules that were added to this
        model object are not.

        Args:
            only_trainable: count only parameters that no rank has frozen. Then every rank must call
                it.
        """
        frozen = self._frozen_names() if only_trainable else set()
        return sum(e.parameter.numel() for e in self._whole().entries() if e.name not in frozen)

    @on_all_ranks
    def _frozen_names(self) -> set[str]:
        """Return the names of the parameters that any rank has frozen."""
        frozen = {e.name for e in self.entries() if not e.parameter.requires_grad}
        return frozen.union(*all_gather_objects(frozen, self.ctx))

    def train_only(self, pattern: str) -> Self:
        """Freeze every parameter whose global name does not match a pattern.

        Call it before the optimizer is created.

        Args:
            pattern: a regular expression that is searched in the names, such as `head|norm` or
                `layers[.](10|11)[.]`. A text that is not a regular expression, such as `*norm*`, is
                a glob that must match the complete name.

        Returns:
            The model itself.

        Raises:
            UserError: if the pattern matches no parameter of the complete model; it lists the
                names.
        """
        trained = self._names_matching(pattern)
        for entry in self.entries():
            entry.parameter.requires_grad_(entry.name in trained and not entry.spec.is_state)
        return self

    def freeze(self, pattern: str) -> Self:
        """Freeze the parameters whose global names match a pattern.

        Args:
            pattern: a regular expression or a glob, as in `train_only`.

        Returns:
            The model itself.

        Raises:
            UserError: if the pattern matches no parameter of the complete model.
        """
        frozen = self._names_matching(pattern)
        for entry in self.entries():
            if entry.name in frozen:
                entry.parameter.requires_grad_(False)
        return self

    def _names_matching(self, pattern: str) -> set[str]:
        """Return the names of the parameters of all stages that match."""
        return names_matching(pattern, [entry.name for entry in self._whole().entries()])

    def _whole(self) -> Any:
        """Build the complete model on the meta device, including attached parameters."""
        whole = self.on_meta(self.config, ParallelContext())
        if self.attached:
            self.attached.attach(whole)
        return whole

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free all gradients, or zero them in place.

        Args:
            set_to_none: True: free them; False: zero them in place.
        """
        super().zero_grad(set_to_none)
        self.engine.forget_gradients()


def names_matching(pattern: str, names: list[str]) -> set[str]:
    """Return the names that match a pattern, as in `Model.train_only`; UserError if it matches
    nothing."""
    wrong = ""
    try:
        found = {name for name in names if re.search(pattern, name)}
    except re.error as error:
        found = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
        wrong = f", and is not a regular expression ({error})"
    if not found:
        kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in names)
        raise UserError(
            f"the pattern {pattern!r} matches no parameter{wrong}; there are {', '.join(kinds)}"
        )
    return found
