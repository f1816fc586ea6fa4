"""Where a forward reads a parameter: only by `use`, so that a storage may gather it."""

import ast
from pathlib import Path

import pytest

import megazoo

PACKAGE = Path(megazoo.__file__).parent
# Functions that change parameters, or describe them: no forward calls them.
OUTSIDE_OF_FORWARD = {
    "Router.batch_counted": "the engine changes the bias between batches",
    "Adapter.change": "merges adapters into weights",
}
FOLDERS = ("layers", "models", "lora")


def classes_with_parameters() -> dict[str, set[str]]:
    """The names of the parameters of each class, those of its base classes included."""
    own, bases = {}, {}
    for folder in FOLDERS:
        for path in (PACKAGE / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    bases[node.name] = {ast.unparse(base).split(".")[-1] for base in node.bases}
                    own[node.name] = set(added_parameters(node)) | own.get(node.name, set())

    def of(name: str, seen: frozenset = frozenset()) -> set[str]:
        if name in seen:
            return set()
        return own.get(name, set()).union(*(of(b, seen | {name}) for b in bases.get(name, ())))

    return {name: names for name in own if (names := of(name))}


def added_parameters(node: ast.ClassDef):
    adding = ("add_parameter", "register_parameter", "add")
    for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
        function = call.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        first = call.args[0] if call.args else None
        if name in adding and isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def direct_reads(text: str, parameters: dict[str, set[str]]) -> list[str]:
    """The places where a class with parameters reads one as an attribute."""
    found = []
    for cls in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
        for method in (each for each in cls.body if isinstance(each, ast.FunctionDef)):
            where = f"{cls.name}.{method.name}"
            if where in OUTSIDE_OF_FORWARD:
                continue
            for node in ast.walk(method):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    is_own = ast.unparse(node.value) in ("self", "self.owner", "layer", "module")
                    if is_own and node.attr in parameters.get(cls.name, ()):
                        found.append(f"{where}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_forward_reads_parameters_only_by_use(folder):
    parameters = classes_with_parameters()
    assert {"Router", "LayerNorm", "VocabParallelHead", "Adapter"} <= parameters.keys()
    found = [
        read
        for path in sorted((PACKAGE / folder).glob("*.py"))
        for read in direct_reads(path.read_text(), parameters)
    ]
    assert found == []


def test_a_direct_read_is_found():
    text = "class Router:\n    def forward(self, x):\n        return x + self.bias\n"
    assert direct_reads(text, {"Router": {"bias"}}) == ["Router.forward: self.bias"]
