"""The commands of megazoo. Each starts as `megazoo NAME` or as a script of a clone. Nothing here
imports torch or tyro."""

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        name: the words after `megazoo`.
        module: module with the function main(arguments).
        script: script of a clone that runs the command, if any.
        summary: help text in one line.
        arguments: arguments that precede those of the user.
    """

    name: str
    module: str
    script: str
    summary: str
    arguments: tuple[str, ...] = ()


def _tool(name: str, program: str, summary: str, *arguments: str, script: str = "") -> Command:
    script = f"tools/{script or program}.py"
    return Command(name, f"megazoo.programs.{program}", script, summary, arguments)


COMMANDS = (
    Command(
        "pretrain",
        "megazoo.pretrain",
        "pretrain_gpt.py",
        "Train a model from random weights, or fine-tune or resume one (--load).",
    ),
    _tool("generate", "generate", "Generate text after a prompt."),
    _tool("chat", "chat", "Chat with a model in the terminal or through a pipe."),
    _tool("evaluate", "evaluate", "Score texts, choices or labels, or run lm-evaluation-harness."),
    _tool(
        "convert",
        "convert",
        "Convert any model to shards, a Hugging Face directory or a GGUF file.",
        script="convert_hf",
    ),
    _tool("inspect", "inspect_checkpoint", "Show what a checkpoint contains, and verify it."),
    _tool("plan", "plan", "Print memory, traffic and bubble of a run, or search for a layout."),
    _tool("check layout", "check_parallel", "Check that layouts train like one process."),
    _tool("check run", "check_run", "Repeat a recorded run, and compare its losses."),
    _tool("check hf", "compare_hf", "Compare logits, loss and gradients with transformers."),
    _tool(
        "check self-test",
        "check_parallel",
        "Insert known bugs of parallel training, and check that each is found.",
        "--self-test",
    ),
    _tool("preprocess", "preprocess_data", "Tokenize text into the files that training reads."),
    _tool("train-tokenizer", "train_tokenizer", "Train a sentencepiece tokenizer."),
    _tool(
        "plot metrics", "plot_metrics", "Plot loss, learning rate, gradient norm and speed of runs."
    ),
    _tool("plot schedule", "plot_schedule", "Draw a pipeline schedule."),
    _tool("plot layout", "plot_layout", "Draw the ranks of a parallel layout."),
    Command(
        "models",
        "megazoo.programs.models",
        "",
        "List families, presets, sizes and Hugging Face names.",
    ),
    Command(
        "recipes",
        "megazoo.programs.recipes",
        "",
        "List ready configuration files for pretrain --config, or copy one.",
    ),
    Command(
        "completion",
        "megazoo.programs.completion",
        "",
        "Print the completion script for bash, zsh or fish.",
    ),
)
_started: Command | None = None  # with the command `megazoo`; None for scripts


def command_named(name: str) -> Command:
    return next(command for command in COMMANDS if command.name == name)


def started_as(command: Command) -> None:
    """Record that this process runs `megazoo NAME`."""
    global _started
    _started = command


def documentation(command: Command) -> str:
    """Return the docstring of a command's module, without importing it."""
    import ast

    spec = find_spec(command.module)
    text = Path(spec.origin).read_text() if spec and spec.origin else ""
    return ast.get_docstring(ast.parse(text)) or ""


def program_name() -> str:
    """Return the name of this program: `megazoo NAME`, or the script."""
    return f"megazoo {_started.name}" if _started else Path(sys.argv[0]).name


def entry(name: str | None = None) -> list[str]:
    """Return the words between `python` or `torchrun` and the arguments of this program, or of the
    command `name`."""
    if _started:
        return ["-m", "megazoo", *(name or _started.name).split()]
    return [_path(_script_of(name))] if name else [sys.argv[0]]


def torchrun_line(
    ranks: int, arguments: list[str] | None = None, name: str | None = None, nodes: int = 1
) -> str:
    """Return the torchrun command that starts this program, or the command `name`, on a number of
    ranks.

    Args:
        ranks: number of ranks.
        arguments: arguments of the program. None: those of this process.
        name: the command.
        nodes: number of nodes. The command starts the ranks of one of them.
    """
    words = sys.argv[1:] if arguments is None else arguments
    launch = f"torchrun --nproc-per-node {ranks // nodes}"
    if nodes > 1:
        launch += f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint NODE:29400"
    return f"{launch} {shlex.join([*entry(name), *words])}"


def command_line(arguments: list[str], name: str | None = None) -> str:
    """Return the command that starts this program, or the command `name`, in one process."""
    if _started:
        words = (name or _started.name).split()
        path = Path(sys.executable).with_name("megazoo")
        if shutil.which("megazoo") == str(path):
            return shlex.join(["megazoo", *words, *arguments])
        return f"{_python()} {shlex.join(['-m', 'megazoo', *words, *arguments])}"
    script = _script_of(name) if name else Path(sys.argv[0])
    return f"{_python()} {shlex.join([_path(script), *arguments])}"


def _script_of(name: str) -> Path:
    """Return the script of a command, in the clone of the script that runs."""
    script = Path(sys.argv[0])
    root = script.parents[1] if script.parent.name == "tools" else script.parent
    return root / command_named(name).script


def _python() -> str:
    """Return the command for this Python, for a shell: `python`, a relative or an absolute path."""
    found = shutil.which("python") == sys.executable
    return "python" if found else shlex.quote(_path(sys.executable))


def _path(file: str | Path) -> str:
    """Return a path: relative if it is below this directory, otherwise absolute."""
    path = os.path.relpath(file)
    return os.path.abspath(file) if path.startswith("..") else path
