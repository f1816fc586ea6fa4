"""Tools of the gallery: the rows of its tables, and functions that patch the program while a check
runs."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from megazoo.models.registry import find_config
from megazoo.testing.shrink import shrink

BUGS: list["Bug"] = []
EVERYWHERE = None  # owner of a function that is replaced in every module that imports it


@dataclass(frozen=True)
class Bug:
    """A bug that raises no error in training: a function of the program is replaced.

    Attributes:
        number: Number in the list of published bugs, with a letter if a bug has several forms; ""
            if it is not in the list.
        title: Description.
        told: Regular expression that the reported cause must match from its beginning.
        owner: Class or module that has the function, or EVERYWHERE.
        name: Name of the function, method or property.
        wrapper: Replacement. Its first argument is the function, the others are those of the call.
        layout: Layout that shows the bug. tp2:pp2 for a bug that shows when a checkpoint of the
            first layout is resumed in the second. "transformers" for a bug that also occurs in one
            process and is found by a comparison with that library.
        model: Preset, which is shrunk.
        settings: Changed values of its config.
        lora_rank: Rank of adapters, which are then the only trained parameters.
        optimizer: adamw or muon.
        loss: Name of the loss.
        dtype: Data type of the parameters, for a bug that shows when a run is resumed.
        offload: Whether the optimizer is offloaded, for such a bug.
        also: Further replacements: (owner, name, wrapper).
        source: Where the bug was published. "rule: ..." for a source that only documents the rule
            that the bug breaks.
        link: Address of the source.
    """

    number: str
    title: str
    told: str
    owner: Any
    name: str
    wrapper: Callable
    layout: str
    model: str = "gpt2"
    settings: dict = field(default_factory=dict)
    lora_rank: int = 0
    optimizer: str = "adamw"
    loss: str = "lm"
    dtype: str = "float32"
    offload: bool = False
    also: Sequence[tuple[Any, str, Callable]] = ()
    source: str = ""
    link: str = ""

    @property
    def config(self):
        """The small config in which the bug is planted."""
        return replace(shrink(find_config(f"{self.model}-tiny")), **self.settings)

    @contextmanager
    def plant(self) -> Iterator[None]:
        """Within this block, the program has the bug."""
        with ExitStack() as stack:
            for owner, name, wrapper in [(self.owner, self.name, self.wrapper), *self.also]:
                stack.enter_context(_wrapped(owner, name, wrapper))
            yield

    def __reduce__(self):
        """Pickle the title: a wrapper can be a lambda."""
        return named, (self.title,)


def named(name: str) -> Bug:
    """Return the bug that has a number or a title."""
    return next(bug for bug in BUGS if name in (bug.number, bug.title))


def _wrapped(owner, name: str, wrapper: Callable):
    def make(before):
        return lambda *given, **options: wrapper(before, *given, **options)

    return replaced_everywhere(name, make) if owner is EVERYWHERE else replaced(owner, name, make)


def without_call(_before, *_given, **_options):
    """Wrapper that does not call the function."""


def then(change: Callable, argument: int = 0) -> Callable:
    """Return a wrapper that calls the function, and then change(one of the function's
    arguments)."""

    def wrapper(before, *given, **options):
        result = before(*given, **options)
        change(given[argument])
        return result

    return wrapper


def replaced(owner, name: str, make: Callable):
    """Within this block, replace owner.name with make(owner.name). For a property, its getter is
    replaced; for a static or class method, its function."""
    before = inspect.getattr_static(owner, name)  # also of a base class
    if isinstance(before, property):
        return mock.patch.object(owner, name, property(make(before.fget)))
    if isinstance(before, staticmethod | classmethod):
        return mock.patch.object(owner, name, type(before)(make(before.__func__)))
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
