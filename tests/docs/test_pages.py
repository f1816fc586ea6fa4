"""The README and the pages of docs/: their blocks run as printed, one after the other; their Python
and their command lines name what there is; and so do their links, flags and files."""

import ast
import dataclasses
import importlib
import inspect
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from megazoo.cli import parsing
from megazoo.cli.flags import parse_flags
from megazoo.cli.parsing import CommandLine
from megazoo.commands import COMMANDS
from megazoo.errors import UserError
from megazoo.families.registry import FAMILIES
from megazoo.models.base import Model
from megazoo.parallel import ParallelContext
from megazoo.settings import settings_of
from megazoo.trainer.options import Options
from tests.docs import refresh_docs
from tests.support.programs import MARK, marked, python
from tests.support.sampling import commit_seed, marked_slow
from tests.support.scripts import program_of

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = [ROOT / "README.md", *PAGES]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"(?<![\w/.])(?:megazoo|tests|tools|configs)/[\w/]+\.(?:py|toml|sbatch)")
NAMED = re.compile(r"# ([\w./-]+\.\w+)\n")  # a block's first line, where it is a file
SECONDS = 300  # for one block
# Of the pages that start programs, half run in `make test`, drawn by the commit: one of each two
# that have about as many lines of bash.
LINES = {
    page: sum(
        block.count("\n") for name, block in BLOCK.findall(page.read_text()) if name == "bash"
    )
    for page in PAGES
}
WITH_PROGRAMS = sorted((page for page in PAGES if LINES[page]), key=LINES.__getitem__)
DRAW = random.Random(commit_seed())
HALF = {DRAW.choice(WITH_PROGRAMS[n : n + 2]) for n in range(0, len(WITH_PROGRAMS), 2)}
# Those of Slurm, pip and hf, and of Megatron-LM in an example of a refusal.
FOREIGN = {
    "--loss-table",  # of parts that pages register
    "--lr-timescale",
    "--likelihood-power",
    "--index-url",
    "--no-deps",
    "--no-index",
    "--find-links",
    "--local-dir",
    "--train-iters",
    "--tensor-model-parallel-size",
    "--use-flash-attn",
    "--nodes",
    "--time",
    "--ntasks-per-node",
    "--gpus-per-node",
    "--requeue",
    "--kill-on-bad-exit",
    "--dependency",
}
# What pages call so.
INSTANCES = {"model": Model, "classifier": Model, "ours": Model, "ctx": ParallelContext}


def stem(page: Path) -> str:
    return page.stem


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


def processes_of(directory: Path, patience: float = 60.0) -> list[int]:
    """The processes that a page in this directory has started and that don't end by themselves."""
    end = time.monotonic() + patience
    while (found := marked(str(directory))) and time.monotonic() < end:
        time.sleep(0.1)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    marked_slow(PAGES, lambda _, page: LINES[page] and page not in HALF, name=stem),
)
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


def test_the_python_of_the_readme_runs_as_printed(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = {}
    for language, block in BLOCK.findall((ROOT / "README.md").read_text()):
        if language == "python":
            exec(compile(block, "README.md", "exec"), names)
    assert names["logits"].shape == (8, 64, 257)
    assert capsys.readouterr().out.endswith("torch.Size([2, 64])\n")


def test_the_python_of_every_page_names_what_there_is():
    """What is imported from megazoo, what is read off its modules, the methods of models and
    contexts, and the names of arguments."""
    for page in TEXTS:
        known = {}
        for language, block in BLOCK.findall(page.read_text()):
            if language == "python":
                tree = ast.parse(block, page.name)
                known |= imported(tree)
                for node in ast.walk(tree):
                    if isinstance(node, ast.Attribute | ast.Name):
                        resolved(node, known)
                    elif isinstance(node, ast.Call):
                        check_arguments(node, resolved(node.func, known))


def imported(tree: ast.AST) -> dict:
    """What a block imports of megazoo, by the names that it gives to it."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("megazoo"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), ast.unparse(node)
                found[alias.asname or alias.name] = getattr(module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("megazoo"):
                    module = importlib.import_module(alias.name)
                    found[alias.asname or "megazoo"] = (
                        module if alias.asname else sys.modules["megazoo"]
                    )
    return found


def resolved(node: ast.AST, known: dict):
    """What a name, or a name of a module or class, stands for; None of what is no import."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = resolved(node.value, known)
    if not (inspect.ismodule(owner) or inspect.isclass(owner)):
        return None
    assert hasattr(owner, node.attr), ast.unparse(node)
    return getattr(owner, node.attr)


def check_arguments(call: ast.Call, function) -> None:
    """function: what is called, or None of what is no import: methods are those of INSTANCES."""
    arguments = list(call.args)
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        owner = INSTANCES.get(call.func.value.id)
        if owner and function is None:
            function = getattr(owner, call.func.attr, None)
            assert function, ast.unparse(call)
            arguments.insert(0, call.func.value)
    if callable(function) and not any(isinstance(each, ast.Starred) for each in arguments):
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        inspect.signature(function).bind_partial(*arguments, **given)


def test_every_command_line_is_one_that_its_program_parses(monkeypatch, tmp_path):
    """By the program itself, which does not run; of README and pages, also where they only print
    it."""
    monkeypatch.syspath_prepend(ROOT / "tools")  # where benchmark.py finds its cases
    monkeypatch.setattr(parsing, "run_file", lambda file: None)
    monkeypatch.chdir(tmp_path)
    for path in (*ROOT.glob("configs/*.toml"), ROOT / "pretrain_gpt.py"):
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        (tmp_path / path.relative_to(ROOT)).symlink_to(path)
    programs = set()
    for page in TEXTS:
        for language, block in BLOCK.findall(page.read_text()):
            if language == "toml":
                Path(NAMED.match(block)[1]).write_text(block)
            elif not language.startswith("py"):
                for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
                    try:
                        programs.add(parsed(line.strip()))
                    except (Exception, SystemExit) as error:
                        pytest.fail(f"{page.name}: {line}\n{error!r}")
    tools = {f"tools/{tool.name}" for tool in (ROOT / "tools").glob("*.py")}
    assert programs - {None} == tools | {"pretrain_gpt.py"}


def parsed(line: str) -> str | None:
    """The program of a line, by which its arguments are parsed; None of a line without one."""
    words = re.match(r"(?:\$ |srun .*?)?(?:\S*python (?=tools/|pretrain_gpt)|torchrun )(.*)", line)
    if not words:
        return parsed_command(line)
    words = words_of(words[1])
    if "torchrun" in line.split():
        launch = get_args_parser().parse_args(words)
        words = [launch.training_script, *launch.training_script_args]
    program, *words = words
    if program == "pretrain_gpt.py":
        try:
            CommandLine.read(words).options()
        except UserError as error:  # a flag of a file that the page's own test runs
            if "--import" not in words or "unknown flag" not in str(error):
                raise
    elif program == "tools/benchmark.py":
        parse_flags(importlib.import_module("benchmark").Options, words, "")
    elif program.startswith("tools/"):
        parse_flags(program_of(program).Options, words, "")
    else:  # a page's own
        return None
    return program


def parsed_command(line: str) -> None:
    """Parse the arguments of `megazoo NAME`, if that is the line."""
    found = re.match(r"(?:\$ )?megazoo (?=\w)(.*)", line)
    words = words_of(found[1]) if found else []
    for command in COMMANDS:
        name = command.name.split()
        if words and words[: len(name)] == name:
            module = importlib.import_module(command.module)
            arguments = words[len(name) :]
            if name == ["pretrain"]:
                CommandLine.read(arguments).options()
            elif hasattr(module, "Options"):
                parse_flags(module.Options, arguments, "")
            return
    assert not words or words[0].endswith(":"), "there is no such command"


def words_of(line: str) -> list[str]:
    """The arguments of a line, without what the page and the shell have to say."""
    command = re.sub(r'(?<=[^\s"]) {3,}.*', "", line)  # what it does, in a second column
    words = [word for word in shlex.split(command, comments=True) if word != "..."]
    for end in ("|", "<", ">", ">>", "&"):  # the shell's
        words = words[: words.index(end)] if end in words else words
    return words


def test_every_link_leads_somewhere_and_every_file_of_the_repository_is_there():
    missing = []
    for page in TEXTS:
        for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            if not re.match(r"[a-z]+:", link) and (
                not target.exists() or (anchor and anchor not in anchors(target))
            ):
                missing.append(f"{page.name} links to {link}")
        named = FILE.findall(without_foreign_columns(page))
        missing += [f"{page.name} names {name}" for name in named if not (ROOT / name).is_file()]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub spells them in links."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_links_to_every_page():
    readme = (ROOT / "README.md").read_text()
    assert "](docs/index.md)" in readme
    links = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "index.md").read_text())
    assert sorted(links) == sorted(page.name for page in PAGES if page.stem != "index")
    assert len(readme.splitlines()) <= 120, "the README is short"


def test_the_page_of_new_models_shows_all_of_qwen3():
    shown = refresh_docs.BLOCK_OF_QWEN3.search(refresh_docs.NEW_MODEL.read_text())[0]
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


def test_the_table_of_flags_has_every_setting():
    page = refresh_docs.OPTIONS.read_text()
    table = page.partition(refresh_docs.BEGIN)[2].partition(refresh_docs.END)[0]
    missing = {"--" + name.replace("_", "-") for name in settings_of(Options)} - set(
        re.findall(r"^\| `(--[\w-]+)`", table, re.MULTILINE)
    )
    assert missing == set()


def test_the_table_of_commands_has_every_script():
    table = refresh_docs.command_table()
    tools = {f"tools/{tool.name}" for tool in (ROOT / "tools").glob("*.py")}
    assert {tool for tool in tools if f"`{tool}`" not in table} == {"tools/benchmark.py"}


@pytest.mark.parametrize(  # the table of models builds each preset without memory
    "page",
    marked_slow(list(refresh_docs.TAKEN), lambda _, page: page.stem == "models", name=stem),
)
def test_what_a_page_takes_from_the_code_is_in_it(page):
    assert page.read_text() == refresh_docs.refreshed(page), "python -m tests.docs.refresh_docs"


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
        is_ours = tool.stem != "benchmark"
        kind = (program_of(tool.name) if is_ours else importlib.import_module(tool.stem)).Options
        settings |= (
            {f.name: f.default for f in dataclasses.fields(kind)}
            if tool.stem != "plan"
            else settings_of(kind)
        )
    flags = {"--" + name.rstrip("_").replace("_", "-") for name in settings}
    switches = {"--no-" + flag[2:] for flag in flags}
    torchrun = {option for action in get_args_parser()._actions for option in action.option_strings}
    torchrun = {option.replace("_", "-") for option in torchrun}
    return flags | switches | torchrun | {"--help", "--help-all", "--fsdp"}
