"""Tools of the gallery: the list of bugs, and functions that patch the program while a check
runs."""

import inspect
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
    """A bug that raises no error in training.

    Attributes:
        number: Number in the list of published bugs, with a letter if a bug has several forms; ""
            if it is not in the list.
        title: Description.
        told: Regular expression that the reported cause must match from its beginning.
        plant: Function that returns a context manager in which the program has the bug.
        layout: Layout that shows the bug. tp2:pp2 for a bug that shows when a checkpoint of the
            first layout is resumed in the second. "transformers" for a bug that also occurs in one
            process and is found by a comparison with that library.
        model: Preset, which is shrunk.
        settings: Changed values of its config.
        lora_rank: Rank of adapters, which are then the only trained parameters.
        optimizer: adamw or muon.
        dtype: Data type of the parameters, for a bug that shows when a run is resumed.
        offload: Whether the optimizer is offloaded, for such a bug.
        source: Where the bug was published. "rule: ..." for a source that only documents the rule
            that the bug breaks.
        link: Address of the source.
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
    dtype: str = "float32"
    offload: bool = False
    source: str = ""
    link: str = ""

    @property
    def config(self):
        """The small config in which the bug is planted."""
        return replace(shrink(find_config(f"{self.model}-tiny")), **self.settings)


def bug(number: str, title: str, told: str, **about):
    """Return a decorator that adds a function to BUGS. The arguments are those of `Bug`; the
    function is its `plant`."""

    def listed(plant):
        BUGS.append(Bug(number, title, told, plant, **about))
        return plant

    return listed


def replaced(owner, name: str, make: Callable):
    """Within this block, replace owner.name with make(owner.name). For a property, its getter is
    replaced."""
    before = inspect.getattr_static(owner, name)  # also of a base class
    if isinstance(before, property):
        return mock.patch.object(owner, name, property(make(before.fget)))
    return mock.patch.object(owner, name, make(before))


@contextmanager
def replaced_everywhere(name: str, make: Callable):
    """Within this block, replace a function in every module that has imported it directly."""
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
