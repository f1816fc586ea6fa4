"""The pages of docs/: their blocks run as printed, one after the other, and what README and pages
name is there."""

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
from programs import MARK, marked, python
from torch.distributed.run import get_args_parser

from megazoo.cli.flags import settings_of
from megazoo.cli.options import Options
from megazoo.models.registry import FAMILIES

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = [ROOT / "README.md", *PAGES]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
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
sys.path.insert(0, str(ROOT / "tools"))


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


def test_every_flag_is_one_of_a_program():
    known = flags_of_programs() | FOREIGN
    for page in TEXTS:
        text = page.read_text()
        if page.stem == "coming_from":  # the first column of its tables has other programs' flags
            text = re.sub(r"^\|[^|]*(?=\|)", "", text, flags=re.MULTILINE)
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
