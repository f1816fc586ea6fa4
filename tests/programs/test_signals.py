"""Ctrl-C, a launcher that is killed, and ranks that are: what is saved, what is said, what is left
running.

Programs are started by Python itself: the stand-in of programs.py would stand between a launcher
and its ranks.
"""

import os
import re
import signal
import subprocess
import time

import pytest

from megazoo.checkpoint import Checkpoint
from tests.support.pretraining import ROOT, TORCHRUN
from tests.support.processes import JOB, Program, lives
from tests.support.programs import python

slow = pytest.mark.slow


@pytest.fixture
def start():
    programs = []

    def begin(*arguments, **named):
        programs.append(Program(*arguments, **named))
        return programs[-1]

    yield begin
    for program in programs:
        program.clear()


def saved_step(path) -> int:
    return Checkpoint(path).trainer["step"]


# under nohup in the background, and where a parent does not wait for its children
IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


@pytest.mark.parametrize(
    ("words", "ignored"),
    [
        pytest.param("--tp 2", (), marks=slow),
        ("--tp 2", IGNORED),
        # whose ranks are not forked
        pytest.param("--tp 2 --import nothing.py", IGNORED, marks=slow),
        pytest.param("", (), marks=slow),
        pytest.param("", IGNORED, marks=slow),
    ],
)
def test_ctrl_c_saves_and_ends_well(start, tmp_path, words, ignored):
    """Also where it was ignored before; SIGHUP then stays so."""
    (tmp_path / "nothing.py").write_text("")
    words = words.replace("nothing.py", str(tmp_path / "nothing.py")).split()
    program = start(*JOB, *words, "--save", tmp_path, ignored=ignored)
    program.wait_for("step      3/")
    if ignored:
        for pid in (program.process.pid, *program.ranks):
            os.kill(pid, signal.SIGHUP)
        told = len(program.out)
        program.wait_for("step", after=told)
    program.interrupt()
    assert program.end() == 0
    assert "Traceback" not in "".join(program.err)
    assert "stopped by SIGINT: trained steps 1 to" in "".join(program.out)
    assert "press Ctrl-C again to end it immediately" in "".join(program.err)
    assert saved_step(tmp_path) >= 3


# A user's file whose step takes longer than anyone waits.
STALL = """
import time
import megazoo.models.base as base

train_batch = base.Model.train_batch

def slow(self, *arguments, step=None, **named):
    if step == 4:
        time.sleep(600)
    return train_batch(self, *arguments, step=step, **named)

base.Model.train_batch = slow
from megazoo import pretrain
from megazoo.cli.program import run_program
run_program(pretrain.main)
"""


@pytest.mark.parametrize(
    "layout",
    [pytest.param(["--tp", 2], marks=slow), []],
    ids=["own launcher", "one process"],
)
def test_a_second_ctrl_c_ends_at_once(start, tmp_path, layout):
    (tmp_path / "stalls.py").write_text(STALL)
    program = start(tmp_path / "stalls.py", *JOB[1:], *layout, "--save", tmp_path / "run")
    program.wait_for("step      3/")
    program.interrupt()
    program.interrupt()  # within half a second: the same one, passed on by another program
    time.sleep(1)
    assert program.process.poll() is None
    program.interrupt()
    assert program.end() == 130  # while the step would last
    assert "Traceback" not in "".join(program.err)
    assert not list((tmp_path / "run").glob("step_*"))


# A user's file: the last rank sends itself a signal in the second batch of an evaluation.
SIGNALLED = """
import os, signal
import megazoo.models.base as base

eval_batch, batches = base.Model.eval_batch, []

def signalled(self, *arguments, **named):
    batches.append(1)
    if len(batches) == 2 and self.ctx.rank == self.ctx.world_size - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    assert len(batches) <= 2, "the evaluation continues"
    return eval_batch(self, *arguments, **named)

base.Model.eval_batch = signalled
from megazoo import pretrain
from megazoo.cli.program import run_program
run_program(pretrain.main)
"""


@pytest.mark.parametrize(
    ("steps", "layout"),
    [
        (2, []),
        pytest.param(9, [], marks=slow),
        (9, ["--pp", 2]),
        pytest.param(9, ["--tp", 2, "--dp", 2], marks=slow),
    ],
)
def test_a_signal_ends_an_evaluation_and_saves_the_step(start, tmp_path, steps, layout):
    (tmp_path / "signalled.py").write_text(SIGNALLED)
    words = ["--eval-steps", 5, "--eval-interval", 2, "--steps", steps, "--mock-data"]
    words += ["--save", tmp_path / "run", "--metrics", tmp_path / "metrics", *layout]
    program = start(tmp_path / "signalled.py", *JOB[1:], *words)
    assert program.end() == 0, program.text
    assert "stopped by SIGTERM: trained steps 1 to 2" in program.text
    assert "the validation after step 2 was stopped" in program.text
    assert program.text.count("saved ") == 1
    assert saved_step(tmp_path / "run") == 2
    assert "eval_loss" not in (tmp_path / "metrics").read_text()


@slow
@pytest.mark.parametrize("words", ["starting 2 ranks", "parameters, on"])
def test_ctrl_c_before_training_ends_quietly(start, words):
    program = start(*JOB, "--tp", 2)
    program.wait_for(words)
    program.wait_for_ranks(2)
    program.interrupt()
    if words == "starting 2 ranks":
        assert program.end() == 130
        assert program.err == []
    else:  # training may have begun meanwhile
        assert program.end() in (0, 130)
        assert "Traceback" not in "".join(program.err)


@pytest.mark.parametrize(
    "launcher", [[], pytest.param([*TORCHRUN, "--nproc-per-node=2"], marks=slow)]
)
def test_ranks_save_and_end_when_their_launcher_is_killed(start, tmp_path, launcher):
    program = start(*launcher, *JOB, "--tp", 2, "--save", tmp_path)
    program.wait_for("step      3/")
    assert len(program.ranks) == 2
    program.process.kill()
    assert program.end() == -signal.SIGKILL
    assert "stopped by the launcher's death: trained steps 1 to" in "".join(program.out)
    assert saved_step(tmp_path) >= 3


@slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_one_rank_of_torchrun_saves_and_ends_all(start, tmp_path, name):
    program = start(*TORCHRUN, "--nproc-per-node=2", *JOB, "--tp", 2, "--save", tmp_path)
    program.wait_for("step      3/")
    os.kill(program.rank(1), getattr(signal, name))
    assert program.end() == 0, program.text
    assert f"stopped by {name}: trained steps 1 to" in "".join(program.out)
    assert saved_step(tmp_path) >= 3


@slow
def test_ranks_that_are_not_training_die_with_their_launcher(start):
    """What the kernel sends ends them: nobody looks at the parent yet."""
    program = start(*JOB, "--tp", 2)
    program.wait_for("parameters, on")
    program.process.kill()
    assert program.end() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("launcher", "layout", "number"),
    [
        pytest.param([], ["--tp", 2], signal.SIGKILL, marks=slow),
        pytest.param([*TORCHRUN, "--nproc-per-node=4"], ["--pp", 2], signal.SIGKILL, marks=slow),
        pytest.param([], ["--tp", 2], signal.SIGSEGV, marks=slow),
        pytest.param([*TORCHRUN, "--nproc-per-node=2"], ["--tp", 2], signal.SIGKILL, marks=slow),
        pytest.param([*TORCHRUN, "--nproc-per-node=2"], ["--tp", 2], signal.SIGSEGV, marks=slow),
    ],
)
def test_the_first_line_names_a_rank_that_died(start, launcher, layout, number):
    program = start(*launcher, *JOB, *layout)
    program.wait_for("step      3/")
    before = len(program.err)
    os.kill(program.rank(1), number)
    code = program.end()
    place = "tp 0, pp 0, dp 1" if "--pp" in layout else "tp 1, pp 0, dp 0"
    hint = ": out of memory, perhaps" if number == signal.SIGKILL else ""
    line = f"rank 1 ({place}) on {os.uname().nodename} was killed by {number.name}{hint}\n"
    assert program.err[before] == line
    assert "".join(program.err).count("was killed by") == 1
    if launcher:
        assert code == 1
    else:
        assert (code, program.err) == (128 + number, [line])


@slow
def test_two_deaths_are_both_told(start):
    program = start(*TORCHRUN, "--nproc-per-node=4", *JOB, "--tp", 2, "--pp", 2)
    program.wait_for("step      3/")
    for pid in [program.rank(2), program.rank(3)]:
        os.kill(pid, signal.SIGKILL)
    assert program.end() == 1
    told = re.findall(r"^rank (\d) .* was killed by SIGKILL", "".join(program.err), re.MULTILINE)
    assert sorted(told) == ["2", "3"]


@slow
def test_a_run_that_ends_well_says_nothing_of_its_ranks(start):
    program = start(*TORCHRUN, "--nproc-per-node=2", *JOB[:-1], 2, "--tp", 2)
    assert program.end(90) == 0
    assert not [line for line in program.err if line.startswith("rank")]


# Ranks that do what their rank's word says.
RANKS = """
import os, signal, sys, time
from multiprocessing import popen_fork

class Late(popen_fork.Popen):  # whose caller is late to hear that it has started
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        if word == "told":
            os.kill(os.getpid(), signal.SIGTERM)
        if word == "4":
            self.wait()

word = sys.argv[1:][int(os.environ.get("RANK", 0))]
if "RANK" not in os.environ:
    from megazoo.launching.local_ranks import LocalRanks
    from megazoo.parallel.layout import Layout
    popen_fork.Popen = Late
    command = [sys.executable, sys.executable, *sys.argv]
    sys.exit(LocalRanks(Layout(tp=2), lambda: os.execv(*command[:1], command[1:])).run())
if word == "deaf":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    print("deaf", flush=True)
if word in ("sleep", "deaf", "told"):
    time.sleep(60)
if word == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(0 if word == "end" else int(word))
"""


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ("end end", 0, ""),
        ("sleep die", 137, "rank 1 (tp 1, pp 0, dp 0) on HOST was killed by SIGKILL"),
        ("3 sleep", 3, "rank 0 (tp 0, pp 0, dp 0) on HOST ended with exit code 3"),
        ("4 4", 4, "rank 0 (tp 0, pp 0, dp 0) on HOST ended with exit code 4"),  # before it looks
        ("2 sleep", 2, ""),  # which says that it has told why
        ("told told", 143, ""),  # to end, while the first rank starts
    ],
)
def test_the_launcher_ends_as_the_first_rank_that_failed(tmp_path, words, code, line):
    (tmp_path / "ranks.py").write_text(RANKS)
    done = subprocess.run(
        [python(), tmp_path / "ranks.py", *words.split()],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code
    assert done.stderr.startswith(line.replace("HOST", os.uname().nodename))
    assert len(done.stderr.splitlines()) == bool(line)


def test_the_launcher_ends_at_a_second_ctrl_c_whatever_its_ranks_do(start, tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    program = start(tmp_path / "ranks.py", "deaf", "deaf")
    while "".join(program.out).count("deaf") < 2:  # the ranks may write into each other's line
        program.wait_for("deaf")
        time.sleep(0.1)
    program.interrupt()
    time.sleep(1)
    assert all(map(lives, program.ranks))
    program.interrupt()
    assert program.end() == 130
    assert program.err == []
