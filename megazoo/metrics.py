"""What a run tells while it goes on: lines on the terminal and a file with one JSON object a step."""

import json
import sys
import time
from pathlib import Path

from megazoo.launch import is_rank_zero


class Metrics:
    """Appends JSON objects to a file, a line each; does nothing without one."""

    def __init__(self, path: Path | None):
        self.path = path
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def write(self, **values) -> None:
        if self.path:
            with open(self.path, "a") as file:
                file.write(json.dumps(values) + "\n")


class Progress:
    """Lines such as "step 20/700  loss 3.1  ...  8,192 tokens/s  1:05 left", every `interval` steps.

    step: where the run starts; steps: where it ends.
    """

    def __init__(self, step: int, steps: int, interval: int):
        self.first, self.steps, self.interval = step, steps, interval
        self.start = self.last_time = time.perf_counter()
        self.tokens = 0  # since the last line

    def time(self) -> str:
        """Since the start."""
        return clock(time.perf_counter() - self.start)

    def line(self, step: int, tokens: int, loss: float, norm: float, lr: float) -> str | None:
        """The line of a step, of so many tokens, or None if it is not its turn. The first and the last have one."""
        self.tokens += tokens
        if step % self.interval and step not in (self.first + 1, self.steps):
            return None
        now = time.perf_counter()
        rate = self.tokens / max(now - self.last_time, 1e-9)
        left = (now - self.start) / (step - self.first) * (self.steps - step)
        self.last_time, self.tokens = now, 0
        return (
            f"step {step:>{len(str(self.steps))}}/{self.steps}  loss {loss:.4f}  grad norm {norm:.3f}  lr {lr:.2e}  "
            f"{rate:,.0f} tokens/s  {clock(left)} left"
        )


def clock(seconds: float) -> str:
    """Seconds as 1:05 or 2:03:04."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def byte_bar(total: int):
    """A progress bar on rank 0's terminal, with rate and time left: `with byte_bar(n) as bar: bar.update(bytes)`."""
    from tqdm import tqdm

    shown = sys.stderr.isatty() and is_rank_zero()
    return tqdm(total=total, unit="B", unit_scale=True, disable=not shown, leave=False)
