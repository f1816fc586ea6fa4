"""The command `megazoo`: its help, its mistakes, its completion, and scripts as its spellings."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megazoo.__main__ import main
from megazoo.commands import COMMANDS, command_line, started_as, torchrun_line
from megazoo.programs.completion import bash, fish
from tests.support.programs import ROOT, python
from tests.support.scripts import program_of


@pytest.fixture(autouse=True)
def nothing_started(monkeypatch):
    monkeypatch.setattr("megazoo.commands._started", None)


def called(monkeypatch, capsys, *words):
    """What `megazoo WORDS` prints: its exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["megazoo", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def test_the_help_lists_all_commands_without_loading_torch():
    program = "import sys; sys.argv[1:] = ['--help']; from megazoo.__main__ import main\n"
    program += (
        "try: main()\nexcept SystemExit: print(sorted({'torch', 'tyro', 'numpy'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert all(f"  {command.name} " in done.stdout for command in COMMANDS)
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "pretrian",
            "unknown command 'pretrian'; did you mean pretrain? (megazoo --help lists all)",
        ),
        ("check", "check needs one of layout, run, hf, self-test"),
        (
            "check layouts",
            "check: unknown command 'layouts': use one of layout, run, hf, self-test",
        ),
        ("check self-test --steps 2", "check self-test: error"),
    ],
)
def test_a_wrong_command_is_one_line(words, line, monkeypatch, capsys):
    code, out, err = called(monkeypatch, capsys, *words.split())
    assert (code, out) == (2, "")
    assert line in err
    assert err.startswith(("megazoo ", "megazoo: error: "))
    assert err.count("\n") == 1


def test_a_command_says_its_own_name(monkeypatch, capsys):
    code, _, err = called(monkeypatch, capsys, "plot", "metrics", "none.jsonl")
    assert (code, err) == (
        2,
        "megazoo plot metrics: error: none.jsonl: No such file or directory\n",
    )
    code, out, _ = called(monkeypatch, capsys, "plot", "schedule", "--help")
    assert (code, out.splitlines()[0]) == (0, "usage: megazoo plot schedule [-h] [OPTIONS]")


@pytest.mark.parametrize("name", ["chat", "generate"])
def test_the_help_says_when_tokens_are_sampled(name, monkeypatch, capsys):
    code, out, _ = called(monkeypatch, capsys, name, "--help")
    words = " ".join(out.replace("│", " ").split())
    assert (code, "(default: the model's, or greedy; 1 with --top-k or --top-p)" in words) == (
        0,
        True,
    )
    assert "generation_config.json of the model samples; with --temperature" in words


def test_every_script_runs_a_command():
    scripts = {file.name for file in (ROOT / "tools").glob("*.py")} - {"benchmark.py"}
    for script in sorted({*scripts, "pretrain_gpt.py"}):
        assert callable(program_of(script).main)
    assert all((ROOT / command.script).is_file() for command in COMMANDS if command.script)


def test_commands_to_go_on_are_spelled_as_the_program_was_started(monkeypatch):
    generate = next(command for command in COMMANDS if command.name == "generate")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--tp", "2"])
    assert command_line(["runs/a b"], "generate").endswith("tools/generate.py 'runs/a b'")
    assert torchrun_line(2) == "torchrun --nproc-per-node 2 pretrain_gpt.py --tp 2"
    monkeypatch.setattr(sys, "argv", ["../clone/tools/evaluate.py"])
    elsewhere = Path.cwd().parent / "clone" / "pretrain_gpt.py"
    assert command_line(["a"], "pretrain").endswith(f" {shlex.quote(str(elsewhere))} a")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/a b/python")
        assert command_line(["a"], "pretrain").startswith("'/a b/python' ")
    started_as(generate)
    assert command_line(["a"], "plot metrics").endswith("megazoo plot metrics a")
    assert torchrun_line(2, ["a"]) == "torchrun --nproc-per-node 2 -m megazoo generate a"


@pytest.mark.parametrize("module", ["megazoo", "megazoo.pretrain"])
def test_a_module_runs_as_a_program_and_starts_its_ranks(module, tmp_path):
    """Outside the clone."""
    words = ["pretrain"] if module == "megazoo" else []
    words += "--tp 2 --steps 2 --layers 1 --seq-length 16 --device cpu --eval-steps 0".split()
    command = [python(), "-m", module, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "as torchrun --nproc-per-node 2 -m megazoo pretrain --tp 2" in done.stdout
    assert "trained steps 1 to 2" in done.stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("pl", "plan plot"),
        ("check ", "layout run hf self-test"),
        ("check layout --shr", "--shrink"),
        ("pretrain --tp 2 --dtype ", "float32 bfloat16 float16"),
        ("convert a b --to ", "shards hf dcp peft gguf"),
    ],
)
def test_bash_completes(words, completed):
    line = ["megazoo", *words.split(" ")]
    script = f"{bash('bash')}\nCOMP_WORDS=({' '.join(word or repr('') for word in line)})"
    script += f"\nCOMP_CWORD={len(line) - 1}\n_megazoo\necho ${{COMPREPLY[@]}}"
    assert subprocess.check_output(["bash", "-c", script], text=True) == f"{completed}\n"


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
def test_fish_completes():
    script = f"{fish()}\ncomplete -C 'megazoo check layout --shr'"
    assert subprocess.check_output(["fish", "-c", script], text=True) == "--shrink\n"
