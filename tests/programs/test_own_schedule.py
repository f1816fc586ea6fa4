"""Schedules of a user's own, with backward in two parts, from an --import file: all programs take
them. One is in a loop, one in a V."""

import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from megazoo.cli import mistakes
from megazoo.parallel.schedule import SCHEDULES
from megazoo.programs import plan, plot_schedule
from tests.support import programs
from tests.support.inference import run_main
from tests.support.pretraining import records
from tests.support.programs import python

ROOT = Path(__file__).parents[2]
OWN = """
from megazoo.parallel.schedule import SCHEDULES, Action, one_f_one_b


def late(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    '''1F1B whose weights' gradients all wait for the end.'''
    table = one_f_one_b(rank, pp, virtual, microbatches)
    table = [action._replace(kind="I") if action.kind == "B" else action for action in table]
    return table + [action._replace(kind="W") for action in table if action.kind == "I"]


SCHEDULES["late"] = late
"""
TRAIN = (
    "--hidden-size 32 --layers 4 --heads 2 --mock-data --steps 3 --seq-length 16 --pp 2 "
    "--global-batch-size 8 --micro-batch-size 2 --log-interval 1 --eval-steps 0"
)
PLAN = "--preset gpt2-tiny --pp 2 --global-batch-size 4 --micro-batch-size 1"


LATE = "--import late.py --schedule late".split()
IN_A_V = "--import v_schedule.py --schedule greedy-v".split()
both = pytest.mark.parametrize("own", [LATE, IN_A_V], ids=["late", "greedy-v"])


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The user's files are in this directory; of their import nothing remains in this process."""
    python()  # whose server must not have this directory for its own: later tests use it, too
    (tmp_path / "late.py").write_text(OWN)
    shutil.copy(Path(programs.__file__).with_name("v_schedule.py"), tmp_path)
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(SCHEDULES):
        yield
    mistakes.user_files.clear()


def run(program, *arguments):
    command = [python(), str(ROOT / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def trained(path, *own):
    """The losses and the gradient norms of three steps."""
    out = run("pretrain_gpt.py", *own, *TRAIN.split(), "--metrics", str(path))
    assert "trained steps 1 to 3" in out
    steps = [record for record in records(path) if "loss" in record]
    assert len(steps) == 3
    return [[step[name] for step in steps] for name in ("loss", "grad_norm")]


@pytest.fixture(scope="module")
def of_1f1b(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("1f1b") / "metrics.jsonl")


@pytest.mark.parametrize(
    "own", [pytest.param(LATE, marks=pytest.mark.slow), IN_A_V], ids=["late", "greedy-v"]
)
def test_its_losses_are_those_of_1f1b(own, of_1f1b, tmp_path):
    """Up to rounding: the sums over micro-batches are in another order."""
    losses, norms = trained(tmp_path / "metrics.jsonl", *own)
    assert losses == pytest.approx(of_1f1b[0], rel=1e-5)
    assert norms == pytest.approx(of_1f1b[1], rel=1e-4)


@pytest.mark.slow
def test_it_trains_interleaved():
    assert "trained steps 1 to 3" in run("pretrain_gpt.py", *LATE, *TRAIN.split(), "--virtual-pp=2")


@both
def test_it_is_drawn_and_planned(own, monkeypatch, capsys):
    words = "--pp 4 --output own.svg".split()
    code, out, error = run_main(plot_schedule, monkeypatch, capsys, *own, *words)
    assert (code, "drew own.svg" in out) == (0, True), error
    code, out, error = run_main(plan, monkeypatch, capsys, *own, *PLAN.split())
    assert (code, "bubble" in out) == (0, True), error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "layout"), [(LATE, "pp2+late"), (IN_A_V, "pp2v2+greedy-v")], ids=["late", "greedy-v"]
)
def test_it_is_checked(own, layout):
    words = f"--model gpt2 --shrink --layouts {layout} --steps 2"
    assert "pass" in run("tools/check_parallel.py", *own[:2], *words.split())
