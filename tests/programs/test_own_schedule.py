"""A schedule of a user's own, with backward in two parts, from an --import file: all programs take
it."""

import subprocess
from pathlib import Path

import pytest

from megazoo.cli import mistakes
from megazoo.parallel.schedule import SCHEDULES
from tests.support.inference import run_main
from tests.support.programs import python
from tools import plan, plot_schedule

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


@pytest.fixture(autouse=True)
def late(tmp_path, monkeypatch):
    """The arguments that name the schedule, of whose import nothing remains in this process."""
    (tmp_path / "late.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    yield "--import late.py --schedule late".split()
    SCHEDULES.pop("late", None)
    mistakes.user_files.clear()


def run(program, *arguments):
    command = [python(), str(ROOT / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_losses_are_those_of_1f1b(late):
    lines = []
    for how in (late, []):
        out = run("pretrain_gpt.py", *how, *TRAIN.split())
        assert "trained steps 1 to 3" in out
        lines.append([line.split("  lr")[0] for line in out.splitlines() if "grad norm" in line])
    assert lines[0] == lines[1]
    assert len(lines[0]) == 3


@pytest.mark.slow
def test_it_trains_interleaved(late):
    assert "trained steps 1 to 3" in run("pretrain_gpt.py", *late, *TRAIN.split(), "--virtual-pp=2")


def test_it_is_drawn_and_planned(late, monkeypatch, capsys):
    words = "--pp 4 --output late.svg".split()
    code, out, error = run_main(plot_schedule, monkeypatch, capsys, *late, *words)
    assert (code, "drew late.svg" in out) == (0, True), error
    code, out, error = run_main(plan, monkeypatch, capsys, *late, *PLAN.split())
    assert (code, "bubble" in out) == (0, True), error


@pytest.mark.slow
def test_it_is_checked(late):
    words = "--model gpt2 --shrink --layouts pp2+late --steps 2"
    assert "pass" in run("tools/check_parallel.py", *late[:2], *words.split())
