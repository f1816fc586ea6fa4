"""megazoo.launch: a function on every rank of a layout, from a script or a notebook."""

import os
import subprocess

import pytest
import torch

import megazoo
from tests.support.pretraining import ROOT
from tests.support.programs import python

# The process computes first, with threads that its forks do not have.
SCRIPT = """
import os, signal, sys, time
import torch, megazoo

torch.set_num_threads(4)
square = torch.randn(800, 800)
ids = torch.arange(64).view(2, 32)
handler = signal.getsignal(signal.SIGTERM)

def trains(ctx):
    torch.set_num_threads(4)
    (square @ square).sum()
    model = megazoo.from_config("gpt2-tiny", ctx)
    return ctx.world_size, round(model.train_batch(ids, labels=ids).item(), 4)

def of_another_size(ctx):
    if ctx.rank == 1:
        raise megazoo.UserError("not this one")
    time.sleep(60)

def fails(ctx):
    if ctx.tp_rank == 1:
        raise ValueError("a\\nmistake")
    time.sleep(60)

def dies(ctx):
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)

def leaves(ctx):
    if ctx.rank:
        time.sleep(60)
    sys.exit(3)

def interrupts(ctx):
    if ctx.rank:
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)

(square @ square).sum()
try:
    print(megazoo.launch(eval(sys.argv[1]), tp=2))
except (Exception, KeyboardInterrupt) as error:
    print(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), sep="\\n")
assert signal.getsignal(signal.SIGTERM) is handler
"""


def printed_by(tmp_path, name) -> list[str]:
    """Return the lines that the script prints for a function; it has no errors."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [python(), tmp_path / "script.py", name],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_every_rank_trains_and_rank_0_returns(tmp_path):
    ids = torch.arange(64).view(2, 32)
    loss = megazoo.from_config("gpt2-tiny").train_batch(ids, labels=ids).item()
    assert printed_by(tmp_path, "trains") == [str((2, round(loss, 4)))]


def test_a_launchers_ranks_call_the_function_themselves(ranks):
    assert ranks(called, 2) == [(0, True), (1, True)]


def called() -> tuple[int, bool]:
    here = os.getpid()
    return megazoo.launch(lambda ctx: (ctx.tp_rank, os.getpid() == here), tp=2, device="cpu")


@pytest.mark.parametrize(
    ("name", "line", "note"),
    [
        ("of_another_size", "UserError: rank 1 (tp 1, pp 0, dp 0): not this one", "UserError"),
        ("fails", "RuntimeError: rank 1 (tp 1, pp 0, dp 0): ValueError: a mistake", "in fails"),
        ("dies", "RuntimeError: rank 1 (tp 1, pp 0, dp 0) on HOST was killed by SIGKILL: out", ""),
        ("leaves", "RuntimeError: rank 0 (tp 0, pp 0, dp 0): SystemExit: 3", "in leaves"),
        ("interrupts", "KeyboardInterrupt: ", ""),
    ],
)
def test_an_error_names_the_rank(tmp_path, name, line, note):
    first, *notes = printed_by(tmp_path, name)
    assert first.startswith(line.replace("HOST", os.uname().nodename))
    assert note in "\n".join(notes)
    assert bool(notes) == bool(note)


def test_cuda_must_not_be_in_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(megazoo.UserError, match="call it before any use of CUDA"):
        megazoo.launch(lambda ctx: None, tp=2)
    assert megazoo.launch(lambda ctx: ctx.world_size, device="cpu") == 1
