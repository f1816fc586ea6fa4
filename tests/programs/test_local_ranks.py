"""Ranks that a program starts itself: forked where that is safe, else started anew."""

import os
import subprocess
import sys

import pytest
import torch

from megazoo.cli import starting
from tests.support.pretraining import ROOT
from tests.support.programs import python

PROGRAM = """
import os, signal, sys, threading, time
from megazoo.cli.starting import start_missing_ranks
from megazoo.cli.mistakes import user_files
from megazoo.launching.local_ranks import PASSED_ON

how, words = sys.argv[1], sys.argv[2:]
if how == "import":
    user_files.append("own.py")
if how == "thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
began = os.getpid()

def work():
    rank = int(os.environ["RANK"])
    handled = [signal.getsignal(number) for number in PASSED_ON]
    assert handled[0] is signal.default_int_handler and set(handled[1:]) == {signal.SIG_DFL}
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert "GROUP_RANK" not in os.environ
    assert os.getsid(0) == os.getpid()
    assert os.environ["MEGAZOO_LAUNCHER"] == str(os.getppid()) or how != "fork"
    print("forked" if began == os.getppid() else "anew", rank, os.environ["WORLD_SIZE"])
    ready = __file__ + ".ready"
    if words[rank] == "late":
        noted = []
        signal.signal(signal.SIGTERM, lambda *_: noted.append(1))
        open(ready, "w").close()
        while not noted:
            time.sleep(0.01)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)
        print("not ended")
    while "late" in words and not os.path.exists(ready):
        time.sleep(0.01)
    if words[rank] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(words[rank]))

start_missing_ranks(work, 2, 1)
"""


def run(tmp_path, *words, **environment):
    (tmp_path / "program.py").write_text(PROGRAM)
    return subprocess.run(
        [python(), tmp_path / "program.py", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_what_keeps_a_program_from_forking(monkeypatch):
    monkeypatch.setattr(starting.threading, "active_count", lambda: 1)
    monkeypatch.setattr(starting, "user_files", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert starting.can_fork() == (sys.platform == "linux")
    for where, name, value in [
        (starting.threading, "active_count", lambda: 2),
        (starting, "user_files", ["own.py"]),
        (torch.cuda, "is_available", lambda: True),
        (sys, "platform", "darwin"),
    ]:
        with monkeypatch.context() as patched:
            patched.setattr(where, name, value)
            assert not starting.can_fork(), name


@pytest.mark.parametrize(
    ("how", "means"),
    [
        ("fork", "forked"),
        ("import", "anew"),
        pytest.param("thread", "anew", marks=pytest.mark.slow),
    ],
)
def test_ranks_are_forked_unless_threads_may_run(tmp_path, how, means):
    done = run(tmp_path, how, "0", "0", RANK="7", LOCAL_WORLD_SIZE="9", GROUP_RANK="1")
    first, *lines = done.stdout.splitlines()
    assert first.startswith("starting 2 ranks here, as torchrun --nproc-per-node 2")
    assert sorted(lines) == [f"{means} 0 2", f"{means} 1 2"], done.stderr
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("word", "code", "line"),
    [
        pytest.param("3", 3, "ended with exit code 3", marks=pytest.mark.slow),
        ("die", 137, "was killed by SIGKILL"),
    ],
)
def test_a_forked_rank_that_fails_ends_the_program(tmp_path, word, code, line):
    done = run(tmp_path, "fork", "0", word)
    assert done.returncode == code
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_rank_that_only_noted_the_signal_is_ended(tmp_path):
    """Such as one whose own error ends its training, and which then waits for rank 0's message."""
    done = run(tmp_path, "fork", "late", "die")
    assert done.returncode == 137
    assert "not ended" not in done.stdout
