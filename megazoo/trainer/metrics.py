"""Metrics of a run: lines on the terminal, a JSONL file with one object per step, TensorBoard,
Weights & Biases, trackio and traces."""

import json
import os
import resource
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megazoo.errors import UserError, advise
from megazoo.files import open_at_once, reason_of
from megazoo.terminal import clock

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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


class Metrics:
    """Writes metrics to a JSONL file, TensorBoard, Weights & Biases and trackio, each optional.

    A later write error, such as a full disk, does not end the run: it is reported once on stderr,
    and the other outputs continue.

    Args:
        path: the JSONL file. Lines are appended.
        tensorboard: TensorBoard's directory. Its values after `step` are hidden.
        wandb, trackio: name of the project.
        step: step at which this start of the run begins.
        runs: the id (wandb) and the name (trackio) of the runs to resume. By default, new runs are
            created.
        settings: settings to show on the pages of the runs.

    Attributes:
        runs: the id (wandb) and the name (trackio) of the open runs.
        lost: for the flag of each failed output, the step and the reason.

    Raises:
        UserError: an output cannot be opened.
    """

    def __init__(
        self,
        path: Path | None = None,
        tensorboard: Path | None = None,
        wandb: str | None = None,
        trackio: str | None = None,
        *,
        step: int = 0,
        runs: dict[str, Any] | None = None,
        settings: dict | None = None,
    ):
        self.path, self.board, self.wandb_run, self.trackio_run = path, None, None, None
        runs, self.runs = runs or {}, {}
        self.lost: dict[str, str] = {}
        flag = f"--metrics {path}"
        try:
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(open_at_once(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT))
            flag = f"--tensorboard {tensorboard}"
            if tensorboard:
                self.board = _open_board(tensorboard, step)
        except OSError as error:
            raise UserError(f"{flag}: {reason_of(error)}", exit_code=1) from error
        if wandb:
            self.wandb_run = _open_wandb(wandb, runs.get("wandb"), settings)
            self.runs["wandb"] = self.wandb_run.id
        if trackio:
            self.trackio_run = _open_trackio(trackio, runs.get("trackio"), settings)
            self.runs["trackio"] = self.trackio_run.name

    def write(self, step: int, values: dict) -> None:
        """Write the metrics of a step, or of an evaluation after it.

        Args:
            step: number of the step.
            values: metrics. Names of an evaluation start with eval_ or test_. None: the
                metric has no value. Only the file has values that are not numbers.
        """
        if self.path:
            line = (json.dumps({"step": step, **values}) + "\n").encode()
            if not kept("--metrics", step, self.lost, lambda: append_line(self.path, line)):
                self.path = None
        named = {}  # with groups: train/loss, eval/loss
        for key, value in values.items():
            kind, name = (
                (key[:4], key[5:]) if key.startswith(("eval_", "test_")) else ("train", key)
            )
            if isinstance(value, int | float):
                named[f"{kind}/{name}"] = value
        if self.board and not kept(
            "--tensorboard", step, self.lost, partial(self._show, self.board, named, step)
        ):
            self.board = None
        if self.wandb_run and not kept(
            "--wandb",
            step,
            self.lost,
            lambda: self.wandb_run.log({"step": step, **named}),
            Exception,
        ):
            self.wandb_run = None
        if self.trackio_run and not kept(
            "--trackio", step, self.lost, lambda: self.trackio_run.log(named, step=step), Exception
        ):
            self.trackio_run = None

    def close(self) -> None:
        """Close TensorBoard, Weights & Biases and trackio, if open."""
        if self.board:
            kept("--tensorboard", None, self.lost, self.board.close)
        if self.wandb_run:
            kept("--wandb", None, self.lost, self.wandb_run.finish, Exception)
        if self.trackio_run:  # after trackio_run.finish(), the exit would finish it again
            kept("--trackio", None, self.lost, import_module("trackio").finish, Exception)

    @staticmethod
    def _show(board: "SummaryWriter", named: dict, step: int) -> None:
        for name, value in named.items():
            board.add_scalar(name, value, step)


def kept(
    flag: str,
    step: int | None,
    lost: dict[str, str],
    write: Callable[[], None],
    errors: type[Exception] = OSError,
) -> bool:
    """Write an output and return whether it succeeded. A failure does not end the run: it is
    reported on stderr and stored in `lost`.

    Args:
        flag: flag of the output.
        step: step after which it is written. None: at the end of the run.
        lost: see `Metrics`.
        write: writes the output.
        errors: exceptions to catch.
    """
    try:
        write()
    except errors as error:
        since = "at the end" if step is None else f"at step {step}"
        if isinstance(error, OSError):
            reason = reason_of(error)
        else:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
        lost[flag] = f"{since}: {reason}"
        advise(f"{flag} could not be written {lost[flag]}; the run continues without it")
        return False
    return True


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file atomically: on an error, a partial line is removed."""
    with open(path, "ab", buffering=0, opener=open_at_once) as file:
        before = os.fstat(file.fileno())
        try:
            written = file.write(line)
            if written < len(line):  # this write raises the error
                file.write(line[written:])
        except OSError:
            if stat.S_ISREG(before.st_mode):
                file.truncate(before.st_size)
            raise


def _open_board(directory: Path, step: int):
    """Open TensorBoard's files. An OSError in its writer thread is raised by the next write, and
    the thread prints no traceback."""
    from torch.utils.tensorboard import SummaryWriter  # the import takes seconds and much memory

    usual = threading.excepthook

    def hook(failure) -> None:
        its_own = type(failure.thread).__module__.startswith("tensorboard.")
        if not its_own or not isinstance(failure.exc_value, OSError):
            usual(failure)

    threading.excepthook = hook
    return SummaryWriter(str(directory), purge_step=step + 1)


def _open_wandb(project: str, run: str | None, settings: dict | None):
    """Open a run in a project of Weights & Biases: a new run, or the run with an id."""
    wandb: Any = import_module("wandb")  # optional dependency
    try:
        opened = wandb.init(project=project, id=run, resume="allow", config=settings)
    except wandb.Error as error:  # for example, no login or no connection
        raise UserError(
            f"--wandb {project}: {error}; WANDB_MODE=offline needs no connection", exit_code=1
        ) from error
    # The built-in step of wandb cannot return to the step of a checkpoint.
    opened.define_metric("*", step_metric="step")
    return opened


def _open_trackio(project: str, run: str | None, settings: dict | None):
    """Open a run in a project of trackio: a new run, or the run with a name."""
    trackio: Any = import_module("trackio")  # optional dependency
    try:
        return trackio.init(project, name=run, resume="allow", config=settings, embed=False)
    except Exception as error:  # errors of trackio and of the Hugging Face hub
        raise UserError(f"--trackio {project}: {error}", exit_code=1) from error


@contextmanager
def traced_steps(
    directory: Path | None, steps: tuple[int, int], rank: int, lost: dict[str, str] | None = None
):
    """Trace steps with torch.profiler into directory/rank_N.json.gz. Yield a function to call after
    each step.

    Args:
        directory: output directory. None: no trace.
        steps: first and last step to trace, counted from 1.
        rank: this rank, N.
        lost: see `Metrics`.
    """
    if not directory:
        yield lambda: None
        return
    from torch import profiler

    directory.mkdir(parents=True, exist_ok=True)
    first, last = steps
    wait, warmup = max(first - 2, 0), min(first - 1, 1)
    file, lost = directory / f"rank_{rank}.json.gz", {} if lost is None else lost

    def export(trace) -> None:
        if not kept("--profile", last, lost, lambda: trace.export_chrome_trace(str(file))):
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

    def time(self) -> str:
        """Return the time since the start, as 1:05."""
        return clock(time.perf_counter() - self.start)

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
