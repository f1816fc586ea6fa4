"""The pages of docs/: their blocks run as printed, one after the other, and what README and pages
name is there."""

import ast
import dataclasses
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from megazoo.cli.flags import settings_of
from megazoo.cli.options import Options
from megazoo.models.registry import FAMILIES
from tests.docs import refresh_docs
from tests.support.programs import MARK, marked, python

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = [ROOT / "README.md", *PAGES]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"(?<![\w/.])(?:megazoo|tests|tools|configs)/[\w/]+\.(?:py|toml|sbatch)")
NAMED = re.compile(r"# ([\w./-]+\.\w+)\n")  # a block's first line, where it is a file
SECONDS = 300  # for one block
# Slurm's.
FOREIGN = {
    "--nodes",
    "--ntasks-per-node",
    "--gpus-per-node",
    "--requeue",
    "--kill-on-bad-exit",
    "--dependency",
}


@pytest.fixture
def families():
    """Takes out again what models a page registers."""
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Runs a block of bash in a directory that looks like the repository's; nothing it starts
    outlives the test."""
    for name in ("pretrain_gpt.py", "tools", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    environment = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {
        "PATH": ":".join(
            [str(Path(python()).parent), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "PYTHONPATH": str(ROOT),
        "PET_STANDALONE": "1",  # torchrun --standalone: a free port, whatever else runs here
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        MARK: str(tmp_path),
    }

    def run(block: str) -> None:
        # a file: a pipe would stay open as long as what a block leaves behind
        told = tmp_path / ".output"
        with told.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-e", "-c", block], env=environment, stdout=file, stderr=subprocess.STDOUT
            )
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                pytest.fail(f"still running after {SECONDS} s:\n{block}")
        if code:
            pytest.fail(f"{block}ended with {code}:\n{told.read_text()[-4000:]}")

    yield run
    left = processes_of(tmp_path)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, "a process was left behind"


def processes_of(directory: Path, patience: float = 5.0) -> list[int]:
    """The processes that a page in this directory has started and that don't end by themselves."""
    end = time.monotonic() + patience
    while (found := marked(str(directory))) and time.monotonic() < end:
        time.sleep(0.1)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.usefixtures("families")
def test_a_page_runs_as_printed(page, shell):
    names = {"__name__": page.stem}
    for language, block in BLOCK.findall(page.read_text()):
        file = NAMED.match(block)
        if language in ("toml", "json") or (language == "python" and file):
            assert file, f"a block of {language} needs the name of its file:\n{block}"
            # JSON has no comments.
            Path(file[1]).write_text(block[file.end() :] if language == "json" else block)
        elif language == "bash":
            shell(block)
        elif language == "python":
            exec(compile(block, page.name, "exec"), names)
        else:
            assert language == "text", (
                f"{page.name} has a block of {language or 'no language'}:\n{block}"
            )


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), (
            f"{page.name} links to {link}: no such heading"
        )


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub spells them in links."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_links_to_every_page():
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES if f"](docs/{page.name})" not in readme] == []


def test_the_index_links_to_every_page():
    links = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "index.md").read_text())
    assert sorted(links) == sorted(page.name for page in PAGES if page.stem != "index")


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_readme_counts_the_lines_of_the_code_to_read():
    counts = refresh_docs.COUNTED.findall((ROOT / "README.md").read_text())
    assert len(counts) > 10
    missing = [path for path, *_ in counts if not (ROOT / path).is_file()]
    assert missing == []
    told = {path: int(count) for path, _, count in counts}
    wrong = {path: n for path, n in told.items() if abs(refresh_docs.line_count(path) - n) > 10}
    assert wrong == {}, "python -m tests.docs.refresh_docs writes the right counts"


def test_the_page_of_new_models_shows_all_of_qwen3():
    shown = refresh_docs.FIRST_BLOCK.search(refresh_docs.NEW_MODEL.read_text())[0]
    assert shown == refresh_docs.QWEN3.read_text(), "python -m tests.docs.refresh_docs"


def test_the_readme_shows_the_block_of_llama():
    """Types are left out, and arguments where ... stands."""
    shown = re.search(r"^```py\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    source = (ROOT / "megazoo" / "models" / "llama.py").read_text()
    theirs = [node for node in ast.parse(source).body if getattr(node, "name", "") == "Block"]
    statements, of_the_file = (
        [
            ast.unparse(node)
            for node in ast.walk(block)
            if isinstance(node, ast.Assign | ast.Return | ast.Expr)
        ]
        for block in (ast.parse(shown), *theirs)
    )
    assert len(statements) >= 6
    for statement in statements:
        beginning = statement.partition("...")[0]
        assert any(line.startswith(beginning) for line in of_the_file), statement


def test_the_table_of_flags_is_that_of_the_settings():
    page = refresh_docs.TRAINING.read_text()
    table = page.partition(refresh_docs.BEGIN)[2].partition(refresh_docs.END)[0]
    missing = {"--" + name.replace("_", "-") for name in settings_of(Options)} - set(
        re.findall(r"^\| `(--[\w-]+)`", table, re.MULTILINE)
    )
    assert missing == set()
    assert table.strip() == refresh_docs.flag_table().strip(), "python -m tests.docs.refresh_docs"


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_every_file_of_the_repository_that_a_page_names_is_there(page):
    text = without_foreign_columns(page)
    assert [name for name in FILE.findall(text) if not (ROOT / name).is_file()] == []


def without_foreign_columns(page: Path) -> str:
    """The text of a page, without what other programs have: the first columns of its tables."""
    text = page.read_text()
    if page.stem == "coming_from":
        text = re.sub(r"^\|[^|]*(?=\|)", "", text, flags=re.MULTILINE)
    return text


def test_every_flag_is_one_of_a_program(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")  # where benchmark.py finds its cases
    known = flags_of_programs() | FOREIGN
    for page in TEXTS:
        text = without_foreign_columns(page)
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))
        assert sorted(named - known) == [], page.name


def flags_of_programs() -> set[str]:
    """The flags of the training program, of all tools, and of torchrun."""
    settings = settings_of(Options)
    for tool in (ROOT / "tools").glob("*.py"):
        module = importlib.import_module(tool.stem)
        kind = getattr(module, "Options", None) or module.ShardingOptions
        settings |= (
            {f.name: f.default for f in dataclasses.fields(kind)}
            if tool.stem != "plan"
            else settings_of(kind)
        )
    flags = {"--" + name.rstrip("_").replace("_", "-") for name in settings}
    switches = {"--no-" + flag[2:] for flag in flags}
    torchrun = {option for action in get_args_parser()._actions for option in action.option_strings}
    return flags | switches | {option.replace("_", "-") for option in torchrun} | {"--help"}
