"""Runs the callbacks of a run, saves checkpoints, and handles signals and errors that end a run
early."""

import math
import uuid
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any

from megazoo.checkpoint import Saver
from megazoo.checkpoint.saving import SHARDS
from megazoo.data import Batches
from megazoo.errors import UserError
from megazoo.formats.dcp.saving import DCP
from megazoo.launching.absent import naming_absent_ranks
from megazoo.layers.router import expert_loads
from megazoo.models.base import Model
from megazoo.models.counts import flops_per_token
from megazoo.optim.adamw import AdamW
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.timing import Stopwatch
from megazoo.terminal import clock, print_rank_0
from megazoo.trainer.callbacks import (
    CALLBACKS,
    Callback,
    Functions,
    Metrics,
    Profile,
    Progress,
    Record,
    Stopped,
    check_metrics,
)
from megazoo.trainer.metrics import (
    peak_flops,
    peak_memory,
)
from megazoo.trainer.run import Run
from megazoo.trainer.state import settings_to_resume
from megazoo.trainer.stop_signal import StopSignal
from megazoo.trainer.tasks import Tasks

BUILT_IN = (Profile, Metrics, Record, Progress, Tasks, Functions)  # callbacks of every run
# Prefix of the names of an evaluation's metrics.
KEYS = {"validation": "eval", "test": "test"}


class Recorder:
    """Runs the callbacks of a run at its steps and evaluations, and saves checkpoints.

    It is a context manager that all ranks enter together. Inside it:

    - an error on one rank ends all ranks with its message;
    - ranks that do not respond are named on stderr;
    - Ctrl-C, SIGTERM and SIGUSR1 request the end of the run.

    The saver is closed after everything except the signal handlers. So the last checkpoint is on
    disk after any error.

    Attributes:
        run: the run.
        model, optimizer: of this rank.
        callbacks: see `Callback`.
        step: last recorded step.
        tokens: number of tokens in that step.
        norm: norm of its gradient before clipping.
        losses: last losses of training, validation and test.
        lost: for the flag of each failed output, the step and the reason.
        stopped_by: name of the signal that ends the run.
    """

    def __init__(self, run: Run, model: Model, optimizer: AdamW):
        self.run, self.model, self.optimizer = run, model, optimizer
        self.step, self.tokens, self.norm, self.losses = run.first_step, 0, 0.0, {}
        self.start, self.lost = perf_counter(), {}
        self.stopped_by: str | None = None
        self.consumed_samples = run.state["consumed_samples"]
        self.consumed_tokens = run.state["consumed_tokens"]
        # Checkpoints of older versions have no id: their steps are treated as those of another run.
        self.run_id = run.state.get("run") or uuid.uuid4().hex
        self.loss_scale = scale_of(optimizer)
        self.counts_experts = hasattr(run.config, "experts")
        training, log, attached = run.options.training, run.options.logging, model.attached
        # FLOPs per token and rank, and peak FLOP/s of the device
        flops = flops_per_token(run.config, training.seq_length, training.train_only, attached)
        self.token_flops = flops / model.ctx.world_size
        self.peak = log.peak_tflops * 1e12 if log.peak_tflops else peak_flops(model.ctx.device)
        self.callbacks = [kind(self) for kind in (*BUILT_IN, *CALLBACKS)]

    def __enter__(self) -> "Recorder":
        ctx, keep = self.model.ctx, self.run.options.checkpoint
        saver = Saver(
            keep.save,
            self.model,
            self.optimizer,
            background=keep.async_save,
            keep_last=keep.keep_last,
            format=DCP if keep.save_format == "dcp" else SHARDS,
            report=print_rank_0,
            after=lambda step, path: self._call("on_save", step, path),
        )
        with ExitStack() as stack:
            # First, so that a launcher's SIGTERM interrupts neither the saver nor the ranks that
            # report an error.
            self.signals = stack.enter_context(StopSignal(ctx))
            self.saver = stack.enter_context(saver)
            stack.enter_context(naming_absent_ranks(ctx))
            stack.enter_context(propagate_errors(ctx))
            states = self.run.state.get("callbacks", {})
            for callback in self.callbacks:
                if callback.name in states:
                    callback.load_state_dict(states[callback.name])
                stack.push(partial(_stop, callback))
                callback.on_start()
            stack.push(self._finish_saving)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *failure) -> bool | None:
        return self._stack.__exit__(*failure)

    def log_step(self, step: int, loss: float, norm: float, tokens: int, watch: Stopwatch) -> None:
        """Record a training step.

        Args:
            step: number of the step.
            loss: its loss.
            norm: norm of the gradient before clipping.
            tokens: number of tokens in the step.
            watch: measured times of the step.

        Raises:
            UserError: the run has diverged.
        """
        self.step, self.tokens, self.norm, self.losses["training"] = step, tokens, norm, loss
        self.consumed_samples += self.run.batch_sizes.at(self.consumed_samples)
        self.consumed_tokens += tokens
        self._check_convergence(loss, norm)
        self._call("on_step", step, self._values(loss, norm, tokens, watch))

    def log_evaluation(self, step: int, name: str, loss: float, measures: dict[str, float]) -> None:
        """Record an evaluation after a step.

        Args:
            step: number of the step.
            name: validation or test.
            loss: loss of the evaluation.
            measures: further metrics.
        """
        self.losses[name] = loss
        values = {"loss": loss, **measures}
        self._call("on_evaluation", step, {f"{KEYS[name]}_{key}": v for key, v in values.items()})

    def time(self) -> str:
        """Return the time since the start, as 1:05."""
        return clock(perf_counter() - self.start)

    def _call(self, event: str, *arguments: Any) -> None:
        """Call a method of every callback."""
        for callback in self.callbacks:
            getattr(callback, event)(*arguments)

    def evaluate(self, step: int) -> None:
        """Run the evaluations of callbacks after a step, and record them. A signal ends them."""
        for callback in self.callbacks:
            if type(callback).evaluate is Callback.evaluate:
                continue
            if self.stop_requested():
                return
            try:
                values = all_gather_objects(callback.evaluate(step), self.model.ctx)[0]
            except Stopped:
                print_rank_0(f"an evaluation after step {step} was stopped")
                return
            check_metrics(type(callback).__name__, values)
            if values:
                self._call("on_evaluation", step, values)

    def _finish_saving(self, kind: type | None, *_: object) -> None:
        """Wait for the last checkpoint, so that `on_save` is called before `on_stop`."""
        if kind is None:
            self.saver.wait()

    def stop_requested(self) -> bool:
        """Return whether any rank received a signal to stop. All ranks call it once per step,
        and before each batch of an evaluation."""
        self.stopped_by = self.signals.agreed()
        return self.stopped_by is not None

    def check_stop(self) -> None:
        """End an evaluation of a callback if any rank received a signal to stop. All ranks call it
        together."""
        if self.stop_requested():
            raise Stopped

    def save(self, step: int, batches: Batches) -> None:
        """Save a checkpoint, if --save is set and the step is not saved yet. batches: the training
        batches."""
        keep = self.run.options.checkpoint
        if not keep.save or self.saver.has(step):
            return
        trainer = {
            "run": self.run_id,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            "data": _with_positions(self.run.fingerprints, batches, self.consumed_samples),
        }
        if self.run.reference:
            trainer["reference"] = self.run.reference
        named = {each.name: each.state_dict() for each in self.callbacks if each.name}
        states = {**self.run.state.get("callbacks", {}), **named}
        trainer["callbacks"] = {name: state for name, state in states.items() if state}
        if file := self.run.options.model.import_:
            trainer["import"] = str(file)  # for information: no program imports it
        trainer["settings"] = settings_to_resume(self.run.options)
        may_fail = keep.on_save_error == "continue" and not self.run.is_last(step)
        self.saver.save(step, trainer, may_fail=may_fail)

    def _check_convergence(self, loss: float, norm: float) -> None:
        """Raise UserError for a loss or gradient that is not finite.

        Gradients may overflow while the loss scale can still decrease.
        """
        before = self.loss_scale
        self.loss_scale = scale_of(self.optimizer)
        diverged = not math.isfinite(norm) and not (self.optimizer.skipped and before > 1)
        if diverged or not math.isfinite(loss):
            raise UserError(
                f"the loss is {loss} and its gradient norm {norm} at step {self.step}: try a "
                "smaller --lr; checkpoints of earlier steps are intact",
                exit_code=1,
            )

    def _values(self, loss: float, norm: float, tokens: int, watch: Stopwatch) -> dict:
        """Return the metrics of a step. Times are in seconds, memory is in bytes."""
        optimizer = self.optimizer
        speed = self.token_flops * tokens / watch.seconds
        values: dict[str, Any] = {
            "loss": loss,
            "grad_norm": None if optimizer.skipped else norm,
            "lr": optimizer.lr,
            "tokens_per_second": tokens / watch.seconds,
            "tflops": speed / 1e12,
        }
        if self.peak:
            values["mfu"] = speed / self.peak
        values |= self.model.engine.loss_metrics
        for name, mean in self.model.engine.auxiliary_losses.items():
            values[f"auxiliary_{name}"] = mean.item()
        if loads := expert_loads(self.model) if self.counts_experts else {}:
            each = [n * len(load) / max(1, sum(load)) for load in loads.values() for n in load]
            values |= {"expert_load_max": max(each), "expert_load_min": min(each)}
            values["expert_tokens"] = loads
        values["step_time"] = watch.seconds
        values |= {f"{part}_time": seconds for part, seconds in watch.times().items()}
        values["consumed_samples"] = self.consumed_samples
        values["consumed_tokens"] = self.consumed_tokens
        values["peak_memory"] = peak_memory(self.model.ctx.device)
        if optimizer.loss_scale:
            values |= {"skipped": optimizer.skipped, "loss_scale": self.loss_scale}
        return values


def _with_positions(fingerprints: list[dict], batches: Batches, consumed: int) -> list[dict]:
    """Return the fingerprints of the sources, with the positions of streamed sources."""
    positions = batches.positions(consumed) or [None] * len(fingerprints)
    return [
        {**source, "position": position} if position else source
        for source, position in zip(fingerprints, positions, strict=False)
    ]


def _stop(callback: Callback, kind: type | None, *_: object) -> None:
    """Call a callback at the end of a run. kind: of the error that ended it."""
    callback.on_stop(failed=kind is not None)


def scale_of(optimizer: AdamW) -> float:
    """Return the loss scale of the next step; 1 without loss scaling."""
    return optimizer.loss_scale.value if optimizer.loss_scale else 1.0
