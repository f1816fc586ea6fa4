"""Where a forward reads a parameter: only by `use`, so that a storage may gather it."""

import ast
from pathlib import Path

import pytest

import megazoo

PACKAGE = Path(megazoo.__file__).parent
FILES = [*(PACKAGE / "layers").glob("*.py"), *(PACKAGE / "models").glob("*.py")]
FILES.append(PACKAGE / "lora" / "layers.py")
PARAMETERS = {"weight", "bias", "A", "B"}
# Functions that change parameters, or describe them: no forward calls them.
OUTSIDE_OF_FORWARD = {
    "round_weights": "rounds weights",
    "pack_weights": "changes the layout of weights",
    "Router.batch_counted": "the engine changes the bias between batches",
    "Adapter.change": "the change of a weight that adapters are merged into",
}
# `bias` of a config is a setting, and `weight` of an autograd function what a layer has read.
OTHERS = ("c", "config", "self.config", "ctx")


def direct_reads(text: str) -> list[str]:
    """The places of a module that read an attribute with the name of a parameter."""
    found = []

    def visit(node: ast.AST, where: str) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            where = f"{where}.{node.name}".strip(".")
        if where in OUTSIDE_OF_FORWARD:
            return
        read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        if read and node.attr in PARAMETERS and ast.unparse(node.value) not in OTHERS:
            found.append(f"{where}: {ast.unparse(node)}")
        for child in ast.iter_child_nodes(node):
            visit(child, where)

    visit(ast.parse(text), "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_forward_reads_parameters_only_by_use(path):
    assert direct_reads(path.read_text()) == []


def test_a_direct_read_is_found():
    text = """class Router:
    def forward(self, x):
        return x + self.bias + self.qkv.weight
    def batch_counted(self, counts):
        self.bias.add_(counts)
"""
    assert direct_reads(text) == ["Router.forward: self.bias", "Router.forward: self.qkv.weight"]
