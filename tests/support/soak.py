"""Train under random deaths, and compare with a run that had none.

$ python -m tests.support.soak --minutes 30 --seed 1

Four ranks, tp 2 x dp 2 with ZeRO-1, train under `torchrun --max-restarts` and save in the
background. At random moments a random rank is killed by SIGKILL, and torchrun starts all again; or
the launcher gets SIGTERM, Ctrl-C or SIGKILL, and another is started with --load. When the time is
up, the run is left to train a few steps more, and stopped. A quiet run then trains as many steps:
the losses of all steps, the weights and the optimizer's moments must be the same, bit for bit.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from megazoo.checkpoint import Checkpoint
from megazoo.checkpoint.places import LATEST
from tests.support.pretraining import ROOT, SMALL, TORCHRUN, losses, records
from tests.support.processes import lives

JOB = [*SMALL, "--tp", "2", "--zero", "1", "--eval-steps", "0", "--lr-decay-steps", "1000"]
KEPT = ["--save-interval", "5", "--async-save", "--keep-last", "2"]
RANKS, ENDLESS = 4, 10_000_000
PAUSE = (1.0, 25.0)  # seconds between two deaths: of those, the ranks need about 8 to start
PEACE = 3  # steps at the end
PATIENCE = 120.0
# What is sent to whom, and how often.
DEATHS = {
    ("rank", signal.SIGKILL): 12,
    ("launcher", signal.SIGTERM): 2,
    ("launcher", signal.SIGINT): 1,
    ("launcher", signal.SIGKILL): 1,
}


@dataclass
class Figures:
    """What came of a soak. deaths: how often which signal was sent to whom."""

    deaths: dict[str, int]
    starts: int = 0
    steps: int = 0
    trained: int = 0
    leftovers: int = 0

    def __str__(self) -> str:
        deaths = ", ".join(f"{count} x {name}" for name, count in self.deaths.items() if count)
        again = self.trained - self.steps
        return (
            f"{sum(self.deaths.values())} deaths ({deaths}); {self.starts} starts of a launcher; "
            f"{self.steps} steps, {again} of them trained again after a death "
            f"({again / max(self.steps, 1):.0%}); {self.leftovers} partial directories left; "
            "losses, weights and moments equal the quiet run's"
        )


class Soak:
    """A run under deaths, in a directory of its own."""

    def __init__(self, directory: Path, seed: int):
        self.save, self.metrics = directory / "run", directory / "metrics"
        self.log = directory / "log"
        self.random = random.Random(seed)
        self.figures = Figures({f"{number.name} to a {whom}": 0 for whom, number in DEATHS})
        self.launcher: subprocess.Popen | None = None

    def run(self, minutes: float) -> Figures:
        until = time.monotonic() + 60 * minutes
        try:
            self.start()
            while time.monotonic() < until:
                time.sleep(self.random.uniform(*PAUSE))
                self.strike()
            self.end_in_peace()
        finally:
            self.clear()
        return self.figures

    def start(self) -> None:
        launcher = [*TORCHRUN, f"--nproc-per-node={RANKS}", "--max-restarts=100000"]
        job = [*JOB, *KEPT, "--steps", str(ENDLESS), "--save", self.save]
        if (self.save / LATEST).exists():
            job += ["--load", self.save]
        self.launcher = launch([*launcher, "pretrain_gpt.py", *job], self.metrics, self.log)
        self.figures.starts += 1

    def strike(self) -> None:
        """Send a signal to a rank or to the launcher."""
        (kind,) = self.random.choices(list(DEATHS), DEATHS.values())
        whom, number = kind
        ranks = children(self.launcher.pid)
        if whom == "rank" and not ranks:
            return
        self.figures.deaths[f"{number.name} to a {whom}"] += 1
        victim = self.random.choice(ranks) if whom == "rank" else self.launcher.pid
        with suppress(ProcessLookupError):
            os.kill(victim, number)
        if whom == "launcher":
            self.launcher.wait(PATIENCE)
            wait_for(lambda: not any(map(lives, ranks)), "ranks outlive their launcher")
            self.start()

    def end_in_peace(self) -> None:
        """Let the run train some steps more, and stop it."""
        lines = len(self.recorded())
        wait_for(lambda: len(self.recorded()) >= lines + PEACE, "no more steps")
        self.launcher.terminate()
        self.launcher.wait(PATIENCE)

    def recorded(self) -> list[dict]:
        return records(self.metrics) if self.metrics.exists() else []

    def clear(self) -> None:
        for pid in (*children(self.launcher.pid), self.launcher.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait(PATIENCE)


def launch(command, metrics: Path, log: Path) -> subprocess.Popen:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment |= {"OMP_NUM_THREADS": "1"}
    with open(log, "a") as output:
        return subprocess.Popen(
            [sys.executable, *map(str, command), "--metrics", metrics],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
        )


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def wait_for(condition, otherwise: str) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, otherwise
        time.sleep(0.1)


def soak(directory: Path, minutes: float, seed: int) -> Figures:
    """Train under deaths and in quiet; AssertionError if anything differs."""
    run = Soak(directory, seed)
    figures = run.run(minutes)
    under_deaths = losses(run.metrics)
    saved = Checkpoint(run.save)
    figures.steps, figures.trained = len(under_deaths), len(run.recorded())
    figures.leftovers = len(list(run.save.glob(".*")))
    assert list(under_deaths) == list(range(1, saved.trainer["step"] + 1))

    quiet = ["--save", directory / "quiet", "--steps", saved.trainer["step"]]
    launcher = [*TORCHRUN, f"--nproc-per-node={RANKS}", "pretrain_gpt.py"]
    started = launch(
        [*launcher, *JOB, *quiet], directory / "quiet-metrics", directory / "quiet-log"
    )
    try:
        assert started.wait(600 + 60 * minutes) == 0, (directory / "quiet-log").read_text()
    finally:
        started.kill()
    assert under_deaths == losses(directory / "quiet-metrics")
    assert tensors(saved)
    assert tensors(saved) == tensors(Checkpoint(directory / "quiet"))
    return figures


def tensors(checkpoint: Checkpoint) -> dict[tuple[str, str], bytes]:
    """All that a step has of tensors, as bytes, by file and name."""
    return {
        (file.name, name): tensor.numpy().tobytes()
        for file in sorted(checkpoint.path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="how long there are deaths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="to keep what was written; a new one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megazoo-soak-") as temporary:
        directory = options.directory or Path(temporary)
        directory.mkdir(exist_ok=True, parents=True)
        print(soak(directory, options.minutes, options.seed))


if __name__ == "__main__":
    main()
