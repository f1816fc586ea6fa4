"""A script of a user that just ends: its ranks meet, and close what their contexts have made."""

import os
import subprocess
import sys

import pytest

from tests.support.pretraining import ROOT
from tests.support.processes import free_port
from tests.support.programs import python
from tests.support.sampling import marked_slow

SCRIPT = """
import atexit, sys
import torch
import torch.distributed as dist

atexit.register(lambda: print("open" if dist.is_initialized() else "closed", flush=True))
import megazoo
from megazoo.parallel import ending

how, rank = sys.argv[1], int(sys.argv[2])
if how == "fails":
    ending.PATIENCE = 1.0
if how == "own":
    dist.init_process_group("gloo")
ctx = megazoo.ParallelContext.from_torch(2, device="cpu")
for group in (ctx.tp_group, dist.group.WORLD):
    dist.all_reduce(torch.ones(9), group=group)
if how == "fails" and rank:
    raise ValueError("a mistake")
if how == "ended":
    dist.destroy_process_group()
"""


def ends_of(how, script):
    """Return the exit codes of both ranks, and their output and errors."""
    port = free_port()
    ranks = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
        command = [python(), str(script), how, str(rank)]
        ranks.append(
            subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    found = [rank.communicate(timeout=120) for rank in ranks]
    return [rank.returncode for rank in ranks], found


@pytest.mark.parametrize(
    ("how", "codes", "said"),
    marked_slow(
        [
            ("megazoo's", [0, 0], ["closed", "closed"]),
            ("own", [0, 0], ["open", "open"]),
            ("ended", [0, 0], ["closed", "closed"]),
        ],
        lambda number, _: number > 0,
    ),
)
def test_what_a_context_made_ends_with_the_process(tmp_path, how, codes, said):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found, texts = ends_of(how, script)
    assert found == codes, texts
    assert [out.strip() for out, _ in texts] == said


def test_a_mistake_of_one_rank_ends_all_with_its_message(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (first, second), texts = ends_of("fails", script)
    assert second != 0
    assert "ValueError: a mistake" in texts[1][1]
    assert "open" in texts[1][0]
    assert first in (0, -6)  # it has no reason to fail; its connections may abort it


@pytest.mark.slow
def test_endings_under_torchrun_are_clean(tmp_path):
    """Without the meeting five of six such runs were aborted on a busy machine."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch.distributed as dist, megazoo\n"
        "ctx = megazoo.ParallelContext.from_torch(2, 2, device='cpu')\n"
        "for group in (ctx.tp_group, ctx.pp_group, dist.group.WORLD):\n"
        "    dist.all_reduce(torch.ones(9), group=group)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command += [f"--master-port={free_port()}", str(script)]
    for _ in range(6):
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert run.returncode == 0, run.stderr[-2000:]
