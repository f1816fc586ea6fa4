"""What the mistakes of the gallery are written with: the list of them, and functions that are
replaced while a check runs."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from unittest import mock

from megazoo.models.registry import find_config
from megazoo.testing.shrink import shrink

BUGS: list["Bug"] = []


@dataclass(frozen=True)
class Bug:
    """A mistake that trains without an error.

    number: of the list of published ones, with a letter where one has several forms; "" for one
    that stands beside them. title: what is wrong. told: a regular expression that the cause, as the
    check names it, must match from its beginning. plant: makes the context in which the program has
    it. layout: in which it shows; "transformers" for what is as wrong in one process, which a
    comparison with that library finds. model, settings: a preset, which is shrunk, with other
    values of its config. lora_rank: of adapters, which then are what is trained. optimizer: adamw
    or muon. source, link: where it was published; "rule: ..." where only the rule stands that it
    breaks.
    """

    number: str
    title: str
    told: str
    plant: Callable[[], AbstractContextManager]
    layout: str
    model: str = "gpt2"
    settings: dict = field(default_factory=dict)
    lora_rank: int = 0
    optimizer: str = "adamw"
    source: str = ""
    link: str = ""

    @property
    def config(self):
        """The small model that it is planted in."""
        return replace(shrink(find_config(f"{self.model}-tiny")), **self.settings)


def bug(number: str, title: str, told: str, **about):
    """Decorate a function that plants a mistake, which then is one of BUGS. Arguments: those of
    `Bug`."""

    def listed(plant):
        BUGS.append(Bug(number, title, told, plant, **about))
        return plant

    return listed


def replaced(owner, name: str, make: Callable):
    """Within this block owner.name is make(owner.name); of a property, its function."""
    before = vars(owner)[name]
    if isinstance(before, property):
        return mock.patch.object(owner, name, property(make(before.fget)))
    return mock.patch.object(owner, name, make(before))


@contextmanager
def replaced_everywhere(name: str, make: Callable):
    """Within this block a function is replaced in every module that has imported it by its name."""
    modules = [
        module
        for key, module in list(sys.modules.items())
        if key.startswith("megazoo.")
        and not key.startswith("megazoo.testing.")
        and name in vars(module)
    ]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(replaced(module, name, make))
        yield
