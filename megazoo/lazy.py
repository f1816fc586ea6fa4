"""Names that are imported when they are first used: a tool that needs no torch doesn't load it."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec


def is_installed(package: str) -> bool:
    """Say whether a package can be imported. A directory of that name, which runs leave behind, is
    found without an origin."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def lazy_attributes(
    package: str, places: dict[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return a `__getattr__` for a package, and a `__dir__` that lists these names and `__all__`.
    Type checkers and editors don't run them: the package imports the names under TYPE_CHECKING.

    places: the module of each of the package's names; a name of a module stands for the module.
    """

    def get(name: str):
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(places[name])
        return module if places[name] == f"{package}.{name}" else getattr(module, name)

    def names() -> list[str]:
        own = vars(sys.modules[package])
        return sorted({*places, *own["__all__"], *(name for name in own if name[:2] == "__")})

    return get, names
