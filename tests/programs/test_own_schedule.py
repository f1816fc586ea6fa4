"""A schedule of a user's own, with backward in two parts, from an --import file: all programs take
it."""

import subprocess
from pathlib import Path

import pytest

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
USES = {
    "trains": ("pretrain_gpt.py", TRAIN, "trained steps 1 to 3"),
    "trains, interleaved": ("pretrain_gpt.py", TRAIN + " --virtual-pp 2", "trained steps 1 to 3"),
    "is drawn": ("tools/plot_schedule.py", "--pp 4 --output late.svg", "drew late.svg"),
    "is planned": (
        "tools/plan.py",
        "--preset gpt2-tiny --pp 2 --global-batch-size 4 --micro-batch-size 1",
        "bubble",
    ),
    "is checked": (
        "tools/check_parallel.py",
        "--model gpt2 --shrink --layouts pp2+late --steps 2",
        "pass",
    ),
}


@pytest.mark.parametrize("use", USES)
def test_a_schedule_from_an_imported_file(use, tmp_path):
    program, arguments, says = USES[use]
    (tmp_path / "late.py").write_text(OWN)
    named = [] if "check" in program else ["--schedule", "late"]
    command = [python(), str(ROOT / program), "--import", "late.py", *named, *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_its_losses_are_those_of_1f1b(tmp_path):
    (tmp_path / "late.py").write_text(OWN)
    lines = []
    for how in (["--import", "late.py", "--schedule", "late"], []):
        command = [python(), str(ROOT / "pretrain_gpt.py"), *how, *TRAIN.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        lines.append(
            [line.split("  lr")[0] for line in done.stdout.splitlines() if "grad norm" in line]
        )
    assert lines[0] == lines[1]
    assert len(lines[0]) == 3
