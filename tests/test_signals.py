"""Ctrl-C, a launcher that is killed, and ranks that are: what is saved, what is said, what is left
running.

Programs are started by Python itself: the stand-in of programs.py would stand between a launcher
and its ranks.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from helpers_pretrain import ROOT, SMALL, TORCHRUN

from megazoo.checkpoint import Checkpoint

JOB = ["pretrain_gpt.py", *SMALL, "--eval-steps", "0", "--steps", "100000"]
SOON = 20.0  # seconds, on a machine that does much else
slow = pytest.mark.slow


class Program:
    """A program in a process group of its own, as a terminal starts it."""

    def __init__(self, *arguments):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        environment = {k: v for k, v in os.environ.items() if k not in names}
        self.process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.out, self.err, self.ranks = [], [], []
        self._readers = [
            threading.Thread(target=lines.extend, args=(stream,), daemon=True)
            for lines, stream in ((self.out, self.process.stdout), (self.err, self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def wait_for(self, words, timeout=90):
        end = time.monotonic() + timeout
        while words not in "".join(self.out):
            assert time.monotonic() < end, f"no {words!r} in {self.out} {self.err}"
            assert self.process.poll() is None, f"ended without {words!r}: {self.out} {self.err}"
            time.sleep(0.02)
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self.ranks = [child for child in map(int, children) if rank_of(child) is not None]

    def rank(self, number) -> int:
        """The process of a rank."""
        return next(pid for pid in self.ranks if rank_of(pid) == number)

    def interrupt(self):
        """What a terminal does at Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, timeout=SOON) -> int:
        """The exit code, once the program and its ranks have ended."""
        code = self.process.wait(timeout)
        until = time.monotonic() + timeout
        while any(map(lives, self.ranks)):
            assert time.monotonic() < until, f"left behind: {self.ranks}"
            time.sleep(0.02)
        for reader in self._readers:
            reader.join(timeout)
        return code

    def clear(self):
        for pid in (self.process.pid, *self.ranks):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


def rank_of(pid) -> int | None:
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    found = re.search(rb"(?:^|\0)RANK=(\d+)\0", environment)
    return int(found[1]) if found else None


def lives(pid) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def start():
    programs = []

    def begin(*arguments):
        programs.append(Program(*arguments))
        return programs[-1]

    yield begin
    for program in programs:
        program.clear()


def saved_step(path) -> int:
    return Checkpoint(path).trainer["step"]


LAYOUTS = [["--tp", 2], pytest.param([], marks=slow)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["own launcher", "one process"])
def test_ctrl_c_saves_and_ends_well(start, tmp_path, layout):
    program = start(*JOB, *layout, "--save", tmp_path)
    program.wait_for("step      3/")
    program.interrupt()
    assert program.end() == 0
    assert "Traceback" not in "".join(program.err)
    assert "stopped by SIGINT: trained steps 1 to" in "".join(program.out)
    assert "a second one ends it at once" in "".join(program.err)
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
import pretrain_gpt
from megazoo.cli.launch import run_program
run_program(pretrain_gpt.main)
"""


@pytest.mark.parametrize("layout", LAYOUTS, ids=["own launcher", "one process"])
def test_a_second_ctrl_c_ends_at_once(start, tmp_path, layout):
    (tmp_path / "stalls.py").write_text(STALL)
    program = start(tmp_path / "stalls.py", *JOB[1:], *layout, "--save", tmp_path / "run")
    program.wait_for("step      3/")
    program.interrupt()
    program.interrupt()  # within half a second: the same one, passed on by another program
    time.sleep(1)
    assert program.process.poll() is None
    program.interrupt()
    assert program.end(5) == 130
    assert "Traceback" not in "".join(program.err)
    assert not list((tmp_path / "run").glob("step_*"))


@pytest.mark.parametrize("words", ["starting 2 ranks", pytest.param("parameters, on", marks=slow)])
def test_ctrl_c_before_training_ends_quietly(start, words):
    program = start(*JOB, "--tp", 2)
    program.wait_for(words)
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
def test_ranks_that_are_not_training_die_with_their_launcher(start):
    program = start(*JOB, "--tp", 2)
    program.wait_for("starting 2 ranks")
    time.sleep(1)
    program.wait_for("starting 2 ranks")  # which are there by now
    assert len(program.ranks) == 2
    program.process.kill()
    assert program.end() == -signal.SIGKILL
    assert "step" not in "".join(program.out[1:])


@pytest.mark.parametrize(
    ("launcher", "layout", "number"),
    [
        ([*TORCHRUN, "--nproc-per-node=2"], ["--tp", 2], signal.SIGKILL),
        ([], ["--tp", 2], signal.SIGSEGV),
        pytest.param([], ["--tp", 2], signal.SIGKILL, marks=slow),
        pytest.param([*TORCHRUN, "--nproc-per-node=4"], ["--pp", 2], signal.SIGSEGV, marks=slow),
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
    for number in (2, 3):
        os.kill(program.rank(number), signal.SIGKILL)
    assert program.end() == 1
    told = re.findall(r"^rank (\d) .* was killed by SIGKILL", "".join(program.err), re.MULTILINE)
    assert sorted(told) == ["2", "3"]


def test_a_run_that_ends_well_says_nothing_of_its_ranks(start):
    program = start(*TORCHRUN, "--nproc-per-node=2", *JOB[:-1], 2, "--tp", 2)
    assert program.end(90) == 0
    assert not [line for line in program.err if line.startswith("rank")]
