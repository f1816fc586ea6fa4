"""Names that are imported when they are first used: a tool that needs no torch doesn't load it."""

from collections.abc import Callable
from importlib import import_module


def lazy_attributes(package: str, places: dict[str, str]) -> Callable:
    """Return a `__getattr__` for a package.

    places: the module of each of the package's names; a name of a module stands for the module.
    """

    def get(name: str):
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(places[name])
        return module if places[name] == f"{package}.{name}" else getattr(module, name)

    return get
