"""Imports go one way: a part of megazoo knows those before it in the order below, none after it.

Read from the text of the files, so that an import within a function counts, too.
"""

import ast
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megazoo.families.table import CLASSES

ROOT = Path(__file__).parents[2]
# From what knows nothing to what knows all. Parts of one line know nothing of each other.
ORDER = [
    ("constants", "errors"),
    ("files", "sidecars", "lazy", "environment", "torch_internals", "callbacks", "commands"),
    ("terminal", "user_files", "settings"),
    ("hub", "gguf_file"),
    ("parallel",),
    ("layers",),
    ("engine", "optim"),
    ("checkpoint", "tokenizer"),
    ("generate",),
    ("families",),
    ("formats",),
    ("models",),
    ("data", "evaluation", "lora", "planning"),
    ("losses",),
    ("launching",),
    ("trainer",),
    ("cli", "compat", "testing"),
    ("pretrain", "programs"),
    ("__main__",),
]
CHECKING = "TYPE_CHECKING"
LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts}


def modules_of(root: Path) -> dict[str, Path]:
    """The modules of a package's directory, by their dotted names."""
    files = {file.relative_to(root.parent): file for file in sorted(root.rglob("*.py"))}
    names = {".".join(place.with_suffix("").parts): file for place, file in files.items()}
    return {name.removesuffix(".__init__"): file for name, file in names.items()}


def statements_of(tree: ast.AST, for_types: bool) -> Iterator[ast.stmt]:
    """The statements of a module. for_types: also those that a type checker alone reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and not for_types and ast.unparse(node.test) == CHECKING:
            continue
        if not isinstance(node, ast.expr):
            yield node
            yield from statements_of(node, for_types)


@cache
def imported_by(text: str, for_types: bool) -> list[ast.Import | ast.ImportFrom]:
    """The imports in the text of a module."""
    statements = statements_of(ast.parse(text), for_types)
    return [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]


def imports_of(
    modules: dict[str, Path], importing=None, for_types: bool = True
) -> dict[str, set[str]]:
    """The modules of megazoo that each module imports, at its top or anywhere inside. importing:
    names of the modules that are read, by default all. for_types: also what is imported for a type
    checker alone."""
    imports = defaultdict(set)
    for name in importing or modules:
        file = modules[name]
        for node in imported_by(file.read_text(), for_types):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                assert node.level == 0, f"{file}: imports are absolute"
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            for target in targets:
                found = target if target in modules else target.rpartition(".")[0]
                if found in modules and found != name:
                    imports[name].add(found)
    return imports


def part_of(module: str) -> str:
    """The part of megazoo that a module belongs to: `layers` of megazoo.layers.linear."""
    return module.split(".")[1] if "." in module else ""


def wrong_ways(imports: dict[str, set[str]]) -> list[str]:
    """Imports of a part that is not before the importing one, the package's own names left out."""
    return [
        f"{module} imports {target}"
        for module, targets in sorted(imports.items())
        for target in sorted(targets)
        if part_of(module) != part_of(target)
        and part_of(module)  # megazoo/__init__.py has names of all parts, for users
        and (not part_of(target) or LEVEL[part_of(target)] >= LEVEL[part_of(module)])
    ]


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, or none."""
    done: set[str] = set()

    def follow(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(imports.get(module, ())):
            if found := follow(target, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(imports) if (found := follow(module, []))), [])


@pytest.fixture(scope="module")
def imports():
    return imports_of(modules_of(ROOT / "megazoo"))


def test_every_part_has_its_place(imports):
    parts = {part_of(module) for module in modules_of(ROOT / "megazoo")} - {""}
    assert parts == LEVEL.keys()


def test_imports_go_one_way(imports):
    assert wrong_ways(imports) == []


def test_no_modules_import_each_other():
    assert circle(imports_of(modules_of(ROOT / "megazoo"), for_types=False)) == []


FROM_ELSEWHERE = ("checkpoint", "formats", "generate", "optim", "tokenizer")


def test_a_model_file_loads_no_files_tokenizers_or_other_families():
    program = "import sys, megazoo.models.llama; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    loaded = {name for name in done.stdout.split() if name.split(".")[0] == "megazoo"}
    assert len(loaded) <= 100
    assert not {name for name in loaded if part_of(name) in FROM_ELSEWHERE}
    families = {f"megazoo.models.{family}" for family in CLASSES}
    assert families & loaded == {"megazoo.models.llama"}


def test_the_package_imports_no_program(imports):
    """What is importable needs neither pretrain_gpt.py nor the tools."""
    for file in (ROOT / "megazoo").rglob("*.py"):
        for node in imported_by(file.read_text(), for_types=True):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            outside = [
                n for n in names if n.partition(".")[0] in ("pretrain_gpt", "tools", "tests")
            ]
            assert not outside, f"{file} imports {outside}"


PLANTED = [  # and whether it is wrong
    ("parallel/random.py", "from megazoo.layers.norm import RMSNorm", True),
    ("checkpoint/format.py", "import megazoo.models.gpt2", True),
    ("layers/norm.py", "def late():\n    from megazoo.models import base", True),
    ("engine/batch.py", "from megazoo.optim import AdamW", True),  # of one line in the order
    ("models/base.py", "from megazoo.lora.settings import LoRASettings", True),
    ("planning/ranks.py", "from megazoo.lora import LoRASettings", True),
    ("errors.py", "import megazoo", True),
    ("planning/run.py", "from megazoo.trainer.options import TrainingOptions", True),
    ("layers/norm.py", "from megazoo.parallel.random import derive_seed", False),
]


def test_a_planted_import_or_circle_is_noticed(imports, tmp_path):
    modules = modules_of(ROOT / "megazoo")

    def with_planted(file: str, line: str, for_types: bool = True) -> dict[str, set[str]]:
        planted = tmp_path / "planted.py"
        planted.write_text((ROOT / "megazoo" / file).read_text() + f"\n{line}\n")
        name = ".".join(("megazoo", *Path(file).with_suffix("").parts))
        others = imports if for_types else imports_of(modules, for_types=False)
        return others | imports_of({**modules, name: planted}, [name], for_types)

    for file, line, wrong in PLANTED:
        assert bool(wrong_ways(with_planted(file, line))) == wrong, line
    found = with_planted("layers/fused.py", "from megazoo.layers.mlp import MLP", for_types=False)
    assert wrong_ways(found) == []
    assert {"megazoo.layers.fused", "megazoo.layers.mlp"} <= set(circle(found))


NAME = re.compile(r"(?<![\w/.-])megazoo((?:\.[A-Za-z_]\w*)+)")


def test_names_of_the_pages_are_there_after_import_megazoo():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = [re.sub(r"(from|-m|:::) megazoo\S*", "", page.read_text()) for page in pages]
    names = {match[0] for text in texts for match in NAME.finditer(text)}
    names -= {"megazoo.json"}  # a file's
    assert len(names) > 20
    script = f"import megazoo\nfor name in {sorted(names)}: eval(name)"
    script += "\nmegazoo.data.documents_of, megazoo.testing.check_parallel, megazoo.testing.compare"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=120)


LAZY = ["", ".checkpoint", ".data", ".evaluation", ".parallel"]


def test_public_names_are_listed_without_torch():
    script = "import sys; import megazoo, megazoo.checkpoint, megazoo.data, megazoo.parallel; "
    script += (
        "print({name: dir(sys.modules[name]) for name in sys.argv[1:]}, 'torch' in sys.modules)"
    )
    packages = [f"megazoo{name}" for name in LAZY if name != ".evaluation"]
    command = [sys.executable, "-c", script, *packages]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    listed, _, loaded = done.stdout.strip().rpartition(" ")
    assert loaded == "False"
    for package, names in ast.literal_eval(listed).items():
        public = sorted(name for name in names if name[0] != "_")
        assert public == sorted(importlib.import_module(package).__all__), package


@pytest.mark.parametrize("package", LAZY)
def test_type_checkers_see_the_names_that_are_imported_lazily(package):
    module = importlib.import_module(f"megazoo{package}")
    seen = {
        alias.asname or alias.name: node.module
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = {name for name in dir(module) if name[0] != "_"}
    assert lazy <= seen.keys()
    for name in lazy:
        there = importlib.import_module(seen[name])
        assert getattr(module, name) is getattr(there, name), name
