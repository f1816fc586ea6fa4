"""The reference of the Python names: every argument of a public function or class is described."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from megazoo.models.base import Model

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
NAMES = re.findall(r"^::: (\S+)$", PAGE.read_text(), re.MULTILINE)
# Users create the first with from_torch or virtual. The second only has declarations.
CREATED_OTHERWISE = {"ParallelContext", "Layer"}


def missing(function) -> list[str]:
    """The parameters that the Args of a docstring lack."""
    text = inspect.getdoc(function) or ""
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    return [name for name in names if not re.search(rf"^ +\*{{0,2}}{name}:", text, re.MULTILINE)]


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_described(name):
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    assert inspect.getdoc(value)
    is_error = isinstance(value, type) and issubclass(value, Exception)
    if attribute not in CREATED_OTHERWISE and not is_error:
        assert missing(value) == []


def test_every_argument_of_a_models_methods_is_described():
    methods = inspect.getmembers(Model, inspect.isfunction)
    lacking = {
        name: missing(method)
        for name, method in methods
        if method.__module__.startswith("megazoo") and not name.startswith("_")
    }
    assert {name: names for name, names in lacking.items() if names} == {}
