"""Import names at their first use, so that tools that do not need torch do not import it."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. A plain directory of that name, such as the output
    of a run, does not count: it has no origin."""
    found = find_spec(package)
    return found is not None and found.origin is not None


class LazyModule:
    """A module that is imported when one of its names is first used."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


def lazy_attributes(
    package: str, places: dict[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package with lazy names.

    `__dir__` lists these names and `__all__`. Type checkers and editors do not run these functions,
    so the package also imports the names under TYPE_CHECKING.

    Args:
        package: name of the package.
        places: for each name, its module. The name of a submodule refers to the submodule, also if
            it is missing here.
    """

    def get(name: str):
        if name not in places:
            if name.startswith("_") or find_spec(f"{package}.{name}") is None:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            return import_module(f"{package}.{name}")
        module = import_module(places[name])
        return module if places[name] == f"{package}.{name}" else getattr(module, name)

    def names() -> list[str]:
        own = vars(sys.modules[package])
        return sorted({*places, *own["__all__"], *(name for name in own if name[:2] == "__")})

    return get, names
