"""Starting the training program in tests, and reading what it records."""

import json
import os
import subprocess
from pathlib import Path

from megazoo.checkpoint.format import manifest_checksum
from tests.support.programs import python

ROOT = Path(__file__).parents[2]
# Small enough for seconds; five layers for uneven stages.
SMALL = (
    "--hidden-size 32 --heads 4 --layers 5 --max-positions 32 --seq-length 32 --device cpu "
    "--global-batch-size 8 --micro-batch-size 2 --warmup-steps 2 --log-interval 1 --eval-steps 1"
).split()
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


def start(launcher, *arguments, executable=None, timeout=240):
    """Run the program by a launcher, [] for none, and wait for its end."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    command = [executable or python(), *launcher, "pretrain_gpt.py", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


def records(path):
    """Return what a metrics file has, a dictionary for each line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(path):
    """Return the training loss of each step in a metrics file."""
    return {record["step"]: record["loss"] for record in records(path) if "loss" in record}


def close(a, b):
    """Return whether two runs have the same steps, and nearly the same losses."""
    return a.keys() == b.keys() and all(abs(a[step] / b[step] - 1) < 1e-5 for step in a)


def name_base(run, path):
    """Have the checkpoint of a run name another base."""
    (step,) = run.glob("step_*")
    manifest = json.loads((step / "megazoo.json").read_text())
    manifest["base"]["path"] = str(path)
    del manifest["crc32"]
    manifest["crc32"] = manifest_checksum(manifest)
    (step / "megazoo.json").write_text(json.dumps(manifest))
