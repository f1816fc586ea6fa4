"""Ordinary mistakes, in files, flags and variables of the environment: each ends, soon, in one line
that names what is wrong. A bug still shows its traceback."""

import contextlib
import errno
import gzip
import json
import os
import shlex
import signal
import sys
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from megazoo import callbacks, pretrain
from megazoo.cli.parsing import CommandLine
from megazoo.cli.program import run_program
from megazoo.environment import LAUNCHER_NAMES, LAUNCHER_PREFIXES
from tests.support.pretraining import ROOT, SMALL
from tests.support.scripts import program_of

SECONDS = 100  # that a mistake may take to be found, on a machine that does much else
LONG, PATH, DIGITS = "a" * 300, "a/" * 2500, "9" * 5000
DEEP = "[" * 100_000 + "]" * 100_000
TOML_DEEP = "a = " + "[" * 10_000 + "]" * 10_000
JOB = shlex.join(SMALL) + " --layers 1 --eval-steps 0 --steps 2 --data mock"
TRAIN = f"pretrain_gpt {JOB}"
GENERATE = "generate hf --tokenizer byte --prompt a --max-new-tokens 2"
EVALUATE = "evaluate hf --tokenizer byte"
RANK0 = "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1"
STEP = "SLURM_STEP_NUM_TASKS"
SLURM = f"SLURM_PROCID=0 {STEP}=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=localhost"

# (program and its arguments, words that the line must have, exit code)
MISTAKES = [
    # names
    (f"{TRAIN} --config {LONG}", "File name too long", 2),
    (f"{TRAIN} --config {PATH}", "File name too long", 2),
    (f"{TRAIN} --load {LONG}", "File name too long", 1),
    (f"{TRAIN} --save {PATH}", "File name too long", 2),
    (f"{TRAIN} --metrics {LONG}", "File name too long", 1),
    (f"{TRAIN} --tensorboard {LONG}", "File name too long", 2),
    (f"{TRAIN} --tokenizer {LONG}", "File name too long", 1),
    (f"{TRAIN} --import {LONG}", "File name too long", 1),
    (f"inspect_checkpoint {PATH}", "File name too long", 1),
    (f"convert_hf hf {LONG}", "File name too long", 1),
    (f"preprocess_data --input text.jsonl --output-prefix {LONG}", "File name too long", 1),
    (f"{TRAIN} --load \udc80", r"--load is '\udc80': it must be text in UTF-8", 2),
    (f"{TRAIN} --steps \udc80", r"\udc80", 2),
    (f"{TRAIN} --\udc80", r"unknown flag --\udc80", 2),
    (f"{GENERATE} --prompt \udc80", "it must be text in UTF-8", 2),
    # devices, pipes and directories in place of files
    (f"{TRAIN} --config zero", "zero is a device or a pipe", 2),
    (f"{TRAIN} --config folder", "--config folder: Is a directory", 2),
    (f"{TRAIN} --load pipe", "pipe is not a directory", 2),
    (f"{TRAIN} --load absent", "absent is not a directory; remove --load to start from", 2),
    (f"{TRAIN} --load zero", "zero is not a directory", 2),
    (f"{TRAIN} --data zero.jsonl", "--data 'zero.jsonl' is not found", 2),
    (f"{TRAIN} --tokenizer random", "unknown tokenizer 'random'", 2),
    (f"{TRAIN} --tokenizer piped", "special_tokens_map.json is a device or a pipe", 2),
    (f"{TRAIN} --import pipe", "pipe is a device or a pipe", 2),
    (f"{TRAIN} --import folder", "folder: it is a directory", 2),
    (f"{TRAIN} --metrics pipe", "--metrics pipe: No such device or address", 1),
    ("plan --model pipe.toml", "pipe.toml is a device or a pipe", 2),
    ("plan --model zero.json", "zero.json is a device or a pipe", 2),
    ("generate hf --tokenizer byte --prompts random", "random is a device or a pipe", 2),
    (f"{EVALUATE} --text pipe --tp 2", "pipe is a device or a pipe", 2),
    (f"{EVALUATE} --text zero", "zero is a device or a pipe", 2),
    ("generate hf --prompts pipe --pp 2", "pipe is a device or a pipe", 2),
    (f"{EVALUATE} --choices zero.jsonl", "zero.jsonl is a device or a pipe", 2),
    (f"{EVALUATE} --text text.jsonl --output folder", "folder is a directory", 2),
    ("plot_metrics random", "random is a device or a pipe", 2),
    ("preprocess_data --input pipe --output-prefix out", "pipe is a device or a pipe", 2),
    ("train_tokenizer --input zero --output out", "zero is a device or a pipe", 2),
    # full disks
    (f"{EVALUATE} --text text.jsonl --output full", "full: No space left on device: make room", 1),
    ("plan --preset gpt2-tiny --json full", "--json full: No space left on device: make room", 1),
    # what files hold
    (f"{TRAIN} --config deep.toml", "deep.toml is not TOML: maximum recursion", 2),
    (f"{TRAIN} --config digits.toml", "digits.toml is not TOML: Exceeds the limit", 2),
    (f"{TRAIN} --config nul.toml", r"nul.toml: save is 'a\x00b': it must be text", 2),
    (f"{TRAIN} --config bytes", "bytes is not TOML", 2),
    (f"{TRAIN} --data no.jsonl.zst", "no.jsonl.zst can't be read", 1),
    (f"{TRAIN} --data no.jsonl.gz", "no.jsonl.gz can't be read: Not a gzipped file", 1),
    (f"{TRAIN} --data cut.jsonl.gz", "cut.jsonl.gz can't be read", 1),
    (f"{TRAIN} --data deep.jsonl", "deep.jsonl, line 1: maximum recursion depth", 2),
    (f"{TRAIN} --data surrogate.jsonl", "surrogate.jsonl, line 1: the text is not Unicode", 1),
    (f"{TRAIN} --tokenizer deep.json", "deep.json can't be read: maximum recursion", 2),
    ("plan --model deep.toml", "deep.toml can't be read: maximum recursion", 2),
    ("plan --model deep.json", "deep.json can't be read: maximum recursion", 2),
    ("plot_metrics deep.jsonl", "deep.jsonl, line 1 is not a line of metrics", 2),
    (f"{EVALUATE} --text deep.jsonl", "deep.jsonl, line 1 is not JSON", 2),
    ("inspect_checkpoint huge", "n_embd is 100000000000000000000000: it must be below", 2),
    ("inspect_checkpoint listed", "model_type is a list: it must be a string", 2),
    ("inspect_checkpoint numbered", "pytorch_model.bin can't be read: it has a tensor", 1),
    ("inspect_checkpoint paired", "it has a tensor whose name is not a string: ('a', 1)", 1),
    ("inspect_checkpoint complex", "has the data type torch.complex64: use one of", 2),
    # --import
    (f"{TRAIN} --import syntax.py", "syntax.py is not Python: invalid syntax", 2),
    (f"{TRAIN} --import nul.py", "nul.py is not Python", 2),
    (f"{TRAIN} --import raises.py", "raises.py, line 2: ZeroDivisionError: division by zero", 2),
    (f"{TRAIN} --import exits.py", "exits.py ends the program: it calls sys.exit(0)", 2),
    (f"{TRAIN} --import bytes", "--import bytes is not a Python file", 2),
    # numbers
    (f"{GENERATE} --top-k 5 --num-return-sequences 1{'0' * 18}", "num_return_sequences 1", 2),
    (f"{GENERATE} --temperature 1e-320", "temperature 1e-320 is out of range", 2),
    (f"{GENERATE} --max-new-tokens 1{'0' * 18}", "exceed the model's max-positions 64", 2),
    (f"{EVALUATE} --text text.jsonl --seq-length 1{'0' * 18}", "must be from 1 to 64, the", 2),
    (f"plot_schedule --microbatches 1{'0' * 18}", "at most 10000 can be drawn", 2),
    ("plot_schedule --cost inf inf inf", "--cost must be three numbers", 2),
    (
        "plan --preset gpt2-tiny --layers 64 --pp 64 --global-batch-size 1000000 "
        "--micro-batch-size 1",
        "are too many to plan with 64 stages",
        2,
    ),
    (f"check_parallel --model gpt2 --ranks 1{'0' * 18}", "ranks 1", 2),
    (f"train_tokenizer --input text.jsonl --output out --vocab-size 1{'0' * 18}", "at most", 2),
    (f"preprocess_data --input text.jsonl --output-prefix o --workers 1{'0' * 18}", "at most", 2),
]  # fmt: skip

# (variables, words that the line must have)
VARIABLES = [
    *((f"{RANK0} {name}={value}", f"the variable {name} is {value!r}: it must be a whole number")
      for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT",
                   "TORCHELASTIC_RESTART_COUNT")
      for value in ("x", "", "-1", "1e9", "0x1")),
    *((f"{SLURM} {name}={value}", f"the variable {name} is {value!r}: it must be a whole number")
      for name in ("SLURM_PROCID", STEP, "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID")
      for value in ("x", "", "-1", "1e9", "0x1")),
    (f"{RANK0} WORLD_SIZE={DIGITS}", "the variable WORLD_SIZE is '999"),
    (f"{RANK0} MASTER_PORT=65536", "the variable MASTER_PORT is '65536'"),
    (f"{RANK0} MASTER_ADDR=", "the variable MASTER_ADDR is not set"),
    ("WORLD_SIZE=2", "the variable RANK is not set"),
    (f"{RANK0} LOCAL_RANK=2", "the variable LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2"),
    ("RANK=1", "the variable RANK is 1, but WORLD_SIZE is not set: ranks count from 0"),
    (f"{RANK0} RANK=2", "the variable RANK is 2, but WORLD_SIZE is 2: ranks count from 0"),
    (f"{SLURM} SLURM_NODEID=1", "the variable SLURM_NODEID is '1'"),
    (f"{SLURM} SLURM_STEP_TASKS_PER_NODE=2(x99999999)", "the variable SLURM_STEP_TASKS_PER_NODE"),
    (f"{SLURM} SLURM_STEP_NODELIST=[", "the variable SLURM_STEP_NODELIST is '['"),
]  # fmt: skip

# Values of generation_config.json that are no ids of tokens.
NO_IDS = ("x", {}, {"a": 1}, float("nan"), 1.5, True, 10**30, [[1]], [1, "x"], [True])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A directory with what the arguments above name."""
    root = tmp_path_factory.mktemp("mistakes")
    for name in ("pipe", "pipe.toml"):
        os.mkfifo(root / name)
    (root / "folder").mkdir()
    for name in ("zero", "zero.json", "zero.jsonl"):
        (root / name).symlink_to("/dev/zero")
    (root / "random").symlink_to("/dev/urandom")
    (root / "full").symlink_to("/dev/full")
    texts = {
        "text.jsonl": '{"text": "some words"}\n' * 9,
        "deep.toml": TOML_DEEP,
        "digits.toml": f"steps = {DIGITS}",
        "nul.toml": 'save = "a\\u0000b"',
        "no.jsonl.zst": "no zstandard",
        "no.jsonl.gz": "no gzip",
        "deep.jsonl": '{"text": ' + DEEP + "}\n",
        "surrogate.jsonl": '{"text": "\\ud800"}\n',
        "deep.json": '{"model_type": ' + DEEP + "}",
        "syntax.py": "def (:\n",
        "nul.py": "a = 1\0\n",
        "raises.py": "def f():\n    return 1 / 0\n\nf()\n",
        "exits.py": "import sys\nsys.exit(0)\n",
    }
    for name, text in texts.items():
        (root / name).write_text(text)
    (root / "bytes").write_bytes(bytes(range(256)))
    (root / "cut.jsonl.gz").write_bytes(gzip.compress(texts["text.jsonl"].encode())[:-9])
    (root / "piped").mkdir()
    (root / "piped" / "vocab.json").write_text('{"a": 0}')
    os.mkfifo(root / "piped" / "special_tokens_map.json")
    _write_models(root)
    return root


def _write_models(root: Path) -> None:
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 257, "n_positions": 64}
    hf = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    hf.save_pretrained(root / "hf")
    config = json.loads((root / "hf" / "config.json").read_text())
    for name, changes in {"huge": {"n_embd": 10**23}, "listed": {"model_type": ["gpt2"]}}.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config | changes))
    weights = hf.state_dict()
    for name, tensors in {
        "numbered": {1: torch.ones(2)},
        "paired": {**weights, ("a", 1): torch.ones(2)},
        "complex": {key: value.to(torch.complex64) for key, value in weights.items()},
    }.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
        torch.save(tensors, root / name / "pytorch_model.bin")


@contextlib.contextmanager
def seconds_left():
    """What a mistake does may take so long; it may wait for a pipe that nobody writes to.

    The timer is that of pytest-timeout, too, whose seconds go on as if nothing had been here.
    """

    def too_long(*_):
        raise AssertionError(f"it took longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, too_long)
    left, _ = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    began = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            passed = time.monotonic() - began
            signal.setitimer(signal.ITIMER_REAL, max(left - passed, 0.001))


@pytest.fixture
def run(files, monkeypatch, capsys):
    """Runs a program within this process, where the files are: its exit code, and what it says."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", *LAUNCHER_PREFIXES)) or name in LAUNCHER_NAMES:
            monkeypatch.delenv(name)
    monkeypatch.setattr("megazoo.cli.program.REPORT_DELAY", 0.1)
    monkeypatch.chdir(files)
    monkeypatch.syspath_prepend(ROOT / "tools")
    capsys.readouterr()

    def call(line: str, variables: str = "") -> tuple[int, str]:
        name, *arguments = line.split(" ")
        program = program_of(name)
        with monkeypatch.context() as patched, seconds_left():
            for variable in shlex.split(variables):
                patched.setenv(*variable.split("=", 1))
            patched.setattr(sys, "argv", [f"{name}.py", *filter(None, arguments)])
            # What SLURM_* say is put beside them.
            patched.setattr(os, "environ", os.environ.copy())
            with pytest.raises(SystemExit) as stop:
                run_program(program.main)
        return stop.value.code, capsys.readouterr().err

    return call


def wrong_line(err: str, program: str, words: str) -> str | None:
    """What is wrong if this is not one line, of the program, with these words in it."""
    line, *rest = err.encode(errors="backslashreplace").decode().splitlines() or [""]
    is_right = line.startswith(f"{program}.py: error: ") and words in line and len(line) < 6000
    return None if is_right and not rest else f"{words!r} is not the line {err[:2000]!r}"


def check_line(err: str, program: str, words: str) -> None:
    assert not (wrong := wrong_line(err, program, words)), wrong


def test_a_mistake_ends_in_one_line(run):
    wrong = []
    for line, words, exit_code in MISTAKES:
        code, err = run(line)
        wrong += filter(None, [wrong_line(err, line.split()[0], words)])
        wrong += [f"{words!r} ended with {code}"] if code != exit_code else []
    assert not wrong


def test_a_malformed_variable_is_named_in_one_line(run):
    wrong = []
    for variables, words in VARIABLES:
        code, err = run(f"{TRAIN} --tp 2", variables)
        wrong += filter(None, [wrong_line(err, "pretrain_gpt", words)])
        wrong += [f"{variables!r} ended with {code}"] if code != 2 else []
    assert not wrong


def test_a_port_that_is_not_for_ranks_is_let_be(run):
    code, err = run(f"{TRAIN} --layers 0", "MASTER_PORT=tcp://10.0.0.1:80")
    check_line(err, "pretrain_gpt", "--layers 0 must be at least 1")
    assert code == 2


def test_a_program_runs_in_a_notebook(run, monkeypatch):
    """Its streams can't be reconfigured."""
    words = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=words.append, flush=lambda: None))
    code, _ = run(f"{TRAIN} --layers 0")
    assert (code, "--layers 0 must be at least 1" in "".join(words)) == (2, True)


def test_ids_of_a_generation_config_are_numbers(run, files, tmp_path):
    theirs = json.loads((files / "hf" / "config.json").read_text())
    for file in ("config.json", "generation_config.json"):
        directory = tmp_path / file
        directory.mkdir()
        for path in (files / "hf").iterdir():
            if path.name != "generation_config.json":
                (directory / path.name).symlink_to(path)
        (directory / file).unlink(missing_ok=True)
        for field, value in product(("eos_token_id", "pad_token_id", "bos_token_id"), NO_IDS):
            (directory / file).write_text(json.dumps(theirs | {field: value}))
            code, err = run(GENERATE.replace("hf", str(directory)))
            words = f"{file}: {field} {value!r} is not a token id"
            check_line(err, "generate", words)
            assert code == 2


@pytest.fixture
def pipe():
    """Makes pipes as <(command) of a shell does: their names."""
    ends = []

    def make(text: str) -> str:
        end, write = os.pipe()
        ends.append(end)
        os.write(write, text.encode())
        os.close(write)
        return f"/dev/fd/{end}"

    yield make
    for end in ends:
        os.close(end)


def test_what_is_read_once_may_be_a_pipe(run, pipe):
    """A mistake in what it holds shows that it was read."""
    lines = {
        f"{EVALUATE} --choices": "line 1 is not JSON",
        "plot_metrics": "line 1 is not a line of metrics",
        f"{TRAIN} --config": "is not TOML",
    }
    for line, words in lines.items():
        code, err = run(f"{line} {pipe('words of no format')}")
        assert (code, words in err) == (2, True), err


def test_settings_that_come_through_a_pipe_are_kept_for_a_resume(pipe):
    line = CommandLine.read(["--config", pipe("steps = 7")])
    assert line.options().training.steps == 7
    resumed = line.options({"steps": 9, "seq_length": 16})
    assert (resumed.training.steps, resumed.training.seq_length) == (7, 16)


def test_a_run_that_goes_on_reads_its_settings_once(pipe, tmp_path):
    pretrain.main([*SMALL, "--steps", "2", "--eval-steps", "0", "--save", str(tmp_path)])
    arguments = ["--load", str(tmp_path), "--config", pipe("steps = 3\nlog_interval = 7")]
    run = pretrain.prepare([*arguments, "--seed", "5"])
    training = run.options.training
    assert (run.first_step, training.steps, training.seed) == (2, 3, 5)
    assert (training.seq_length, run.options.logging.log_interval) == (32, 7)  # of SMALL; given


def test_settings_that_come_through_a_pipe_are_for_one_rank(run, pipe):
    code, err = run(f"{TRAIN} --config {pipe('tp = 2')}")
    check_line(err, "pretrain_gpt", "is a pipe, which only one rank can read: use a file")
    assert code == 2
    code, err = run(f"{TRAIN} --tp 2 --config {pipe('')}", RANK0)
    check_line(err, "pretrain_gpt", "is a device or a pipe")


LINE_OF_BUG = "this is a bug in megazoo: please report it with the lines above (megazoo "


def test_a_bug_shows_its_traceback_and_a_line_that_says_so(run, monkeypatch):
    def planted(*_):
        return 1 / 0

    monkeypatch.setattr(pretrain, "train", planted)
    code, err = run(TRAIN)
    *lines, last = err.splitlines()
    assert (code, lines[0]) == (1, "Traceback (most recent call last):")
    assert lines[-1] == "ZeroDivisionError: division by zero"
    python_version = ".".join(map(str, sys.version_info[:3]))
    assert last.startswith(LINE_OF_BUG)
    assert last.endswith(f"python {python_version})")


def test_an_error_below_the_users_file_names_that_file(run, files):
    (files / "fails.py").write_text(
        "import megazoo\n\n@megazoo.on_step\ndef tell(step, values, model):\n    values['none']\n"
    )
    try:
        code, err = run(f"{TRAIN} --import fails.py")
    finally:
        callbacks._steps.clear()
    first, *_, last = err.splitlines()
    assert (code, last) == (1, "KeyError: 'none'")
    assert first == f"the error occurred in or below {files}/fails.py, which --import ran:"


LACKS = [
    (OSError(errno.ENOSPC, "No space left on device", "some/file"), "some/file: No space left"),
    (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    (RecursionError("maximum recursion depth exceeded"), "nested too deeply: maximum"),
    (MemoryError(), "out of memory: use smaller batches"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried\nto"), "(CUDA out of memory. Tried)"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "text cannot be decoded or encoded"),
]


def test_what_the_machine_lacks_is_told_in_one_line(run, monkeypatch):
    def planted(*_):
        raise error

    monkeypatch.setattr(pretrain, "train", planted)
    for error, words in LACKS:  # noqa: B007 (planted reads it)
        code, err = run(TRAIN)
        check_line(err, "pretrain_gpt", words)
        assert code == 1
    monkeypatch.setattr(pretrain, "train", lambda *_: torch.empty(1 << 55))
    code, err = run(TRAIN)
    check_line(err, "pretrain_gpt", "out of memory (")
    assert code == 1
