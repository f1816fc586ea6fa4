"""Import names at their first use, so that tools that do not need torch do not import it."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. A plain directory of that name, such as the output
    of a run, does not count: it has no origin."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def lazy_attributes(
    package: str, places: dict[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package with lazy names.

    `__dir__` lists these names and `__all__`. Type checkers and editors do not run these functions,
    so the package also imports the names under TYPE_CHECKING.

    Args:
        package: name of the package.
        places: for each name, its module. The name of a submodule refers to the submodule.
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
