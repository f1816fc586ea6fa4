"""Lines on the terminal, traces, and the speed and memory of devices."""

import resource
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

from megazoo.terminal import clock

# TFLOP/s of dense bf16 matrix products (fp16 on the V100), by a part of the device's name. The
# first match is used.
PEAK_TFLOPS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H200 NVL": 835,
    "H100": 989,
    "H200": 989,
    "H800": 989,
    "GH200": 989,
    "GB200": 2500,
    "B200": 2250,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "V100": 125,
    "MI300X": 1307,
}


def peak_flops(device: torch.device) -> float | None:
    """Return the vendor's peak FLOP/s of a device in bf16, or None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)


def peak_memory(device: torch.device) -> int:
    """Return the peak of allocated bytes on a GPU, or on the CPU the peak resident size of the
    process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def traced_steps(
    directory: Path | None,
    steps: tuple[int, int],
    rank: int,
    kept: Callable[[int, Callable[[], None]], bool],
):
    """Trace steps with torch.profiler into directory/rank_N.json.gz. Yield a function to call after
    each step.

    Args:
        directory: output directory. None: no trace.
        steps: first and last step to trace, counted from 1.
        rank: this rank, N.
        kept: called as kept(step, write); calls write(), and returns whether that succeeded.
    """
    if not directory:
        yield lambda: None
        return
    from torch import profiler

    directory.mkdir(parents=True, exist_ok=True)
    first, last = steps
    wait, warmup = max(first - 2, 0), min(first - 1, 1)
    file = directory / f"rank_{rank}.json.gz"

    def export(trace) -> None:
        if not kept(last, lambda: trace.export_chrome_trace(str(file))):
            file.unlink(missing_ok=True)

    with profiler.profile(
        schedule=profiler.schedule(wait=wait, warmup=warmup, active=last - first + 1, repeat=1),
        on_trace_ready=export,
    ) as trace:
        yield trace.step


class StepLines:
    """Formats lines such as "step 20/700  loss 3.1  ...  1:05 left", one every `interval` steps.

    The speed in a line is the mean over the steps since the previous line, without evaluations and
    saves. Its memory is the peak of rank 0.

    Args:
        step: step at which the run starts.
        steps: step at which the run ends.
        interval: steps between lines.
        token_flops: FLOPs per token and device.
        peak: peak FLOP/s of a device, for the MFU. None: unknown.
    """

    def __init__(
        self, step: int, steps: int, interval: int, token_flops: float, peak: float | None = None
    ):
        self.first, self.steps, self.interval = step, steps, interval
        self.token_flops, self.peak = token_flops, peak
        self.start = time.perf_counter()
        self.last_step, self.tokens, self.seconds = step, 0, 0.0  # of the last line, and since it

    def line(
        self,
        step: int,
        tokens: int,
        seconds: float,
        loss: float,
        norm: float,
        lr: float,
        memory: int,
    ) -> str | None:
        """Return the line of a step, or None between intervals. The first and the last step always
        have a line.

        Args:
            step: number of the step.
            tokens: number of tokens in the step.
            seconds: duration of the step.
            loss: loss of the step.
            norm: norm of the gradient.
            lr: learning rate.
            memory: peak memory in bytes.
        """
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        if step % self.interval and step not in (self.first + 1, self.steps):
            return None
        total = max(self.seconds, 1e-9)
        rate, step_time = self.tokens / total, total / (step - self.last_step)
        flops = rate * self.token_flops
        each = (time.perf_counter() - self.start) / (step - self.first)  # with evaluations
        left = each * (self.steps - step)
        self.last_step, self.tokens, self.seconds = step, 0, 0.0
        return (
            f"step {step:>{len(str(self.steps))}}/{self.steps}  loss {loss:.4f}  "
            f"grad norm {norm:.3f}  lr {lr:.2e}  {step_time * 1e3:,.0f} ms  {rate:,.0f} tokens/s  "
            f"{_tflops(flops)} TFLOP/s  "
            + (f"mfu {flops / self.peak:.1%}  " if self.peak else "")
            + f"{memory / 1e9:.2f} GB  {clock(left)} left"
        )


def _tflops(flops: float) -> str:
    """Format FLOP/s in TFLOP/s, with two decimals or, below 0.1, with two significant digits."""
    return f"{flops / 1e12:,.2f}" if flops >= 1e11 else f"{flops / 1e12:.2g}"
