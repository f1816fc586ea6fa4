"""Callbacks of a run: lines, metrics, the record, the profile and functions of users.

A file of --import registers a further callback:

    @megazoo.trainer.register_callback
    class Longest(megazoo.trainer.Callback):
        name = "longest"
        seconds = 0.0

        def on_step(self, step, values):
            self.seconds = max(self.seconds, values["step_time"])

        def state_dict(self):
            return {"seconds": self.seconds}

        def load_state_dict(self, state):
            self.seconds = state["seconds"]
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from megazoo import callbacks as users
from megazoo.environment import is_rank_zero
from megazoo.errors import UserError, advise
from megazoo.files import convert, reason_of
from megazoo.parallel.context import AXES
from megazoo.settings import flag_of
from megazoo.terminal import print_rank_0
from megazoo.trainer.metrics import StepLines, traced_steps
from megazoo.trainer.outputs import OUTPUTS, Output
from megazoo.trainer.record import Step, begin_record, record_step
from megazoo.trainer.state import MetricRun, OutputName, settings_to_resume

if TYPE_CHECKING:
    from megazoo.trainer.recorder import Recorder

SHOWN = {"eval_loss": "validation loss", "test_loss": "test loss"}  # in lines of evaluations
CALLBACKS: list[type["Callback"]] = []
Class = TypeVar("Class", bound=type["Callback"])


class Callback:
    """Runs at the events of a training run. All ranks have the same callbacks, in the same order.

    Its methods may run the model and use collectives. An exception on any rank ends the run.

    Attributes:
        name: Key of its state in checkpoints. "": it has no state.
        trainer: The run's recorder, with `run`, `model` and `optimizer`.
    """

    name: ClassVar[str] = ""

    def __init__(self, trainer: "Recorder"):
        self.trainer = trainer

    def on_start(self) -> None:
        """Called before the first step, after `load_state_dict`."""

    def on_step(self, step: int, values: dict[str, Any]) -> None:
        """Called after each step. values: its metrics, with the names of the metrics file."""

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of a further evaluation: numbers, with names that start with eval_.

        Called on every rank when an evaluation is due; the values of rank 0 are recorded. A long
        evaluation calls `self.trainer.check_stop()` from time to time, on all ranks: a signal then
        ends it, and the run saves.
        """
        return {}

    def on_evaluation(self, step: int, values: dict[str, Any]) -> None:
        """Called after each evaluation. values: its metrics. Names start with eval_ or test_."""

    def on_save(self, step: int, path: Path) -> None:
        """Called when a checkpoint is completely written. See `megazoo.on_save`."""

    def on_stop(self, failed: bool) -> None:
        """Called at the end of the run. failed: whether an error ended it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints, in types of JSON. Called on every rank; that of rank 0
        is stored."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of the run that is resumed. Called on every rank."""


class Stopped(Exception):
    """A signal ended an evaluation."""


def check_metrics(name: str, values: Any) -> None:
    """Raise UserError unless an evaluation returned numbers with names that start with eval_. name:
    of its callback."""
    for key, value in values.items():
        if not key.startswith("eval_") or not isinstance(value, int | float):
            raise UserError(
                f"{name}.evaluate returned {key} {value!r}: it must return numbers, with names "
                "that start with eval_",
                exit_code=1,
            )


def register_callback(callback: Class) -> Class:
    """Register a class of callbacks, of which each run creates one. It is a class decorator.

    Args:
        callback: A subclass of `Callback`.

    Raises:
        UserError: Another callback has the same name.
    """
    others = [Metrics, *CALLBACKS]
    if callback.name and callback.name in [each.name for each in others]:
        raise UserError(f"two callbacks have the name {callback.name}: use another name")
    CALLBACKS.append(callback)
    return callback


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
        lost: for the flag of each failed output, the step and the reason.
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


class Profile(Callback):
    """Traces the steps of --profile-steps."""

    def __init__(self, trainer: "Recorder"):
        super().__init__(trainer)
        self.stack = ExitStack()

    def on_start(self) -> None:
        log = self.trainer.run.options.logging
        self.traced = self.stack.enter_context(
            traced_steps(log.profile, log.profile_steps, self.trainer.model.ctx.rank, self._kept)
        )

    def on_step(self, step: int, values: dict[str, Any]) -> None:
        self.traced()

    def on_stop(self, failed: bool) -> None:
        self.stack.close()

    def _kept(self, step: int, write: Callable[[], None]) -> bool:
        return kept("--profile", step, self.trainer.lost, write)


class Metrics(Callback):
    """Writes metrics to the outputs of the run, on rank 0.

    A later write error, such as a full disk, does not end the run: the other outputs continue.
    """

    name = "outputs"

    def __init__(self, trainer: "Recorder"):
        super().__init__(trainer)
        self.outputs: dict[str, Output] = {}
        self.runs: dict[str, str] = {}  # the run_id of each output, also of those without a flag

    def on_start(self) -> None:
        if not is_rank_zero():
            return
        run, ctx = self.trainer.run, self.trainer.model.ctx
        settings = {**asdict(run.config), **settings_to_resume(run.options)}
        settings |= {name: ctx.axis(name).size for name in AXES}
        for name, output in OUTPUTS.items():
            if value := run.options.values[name]:
                opened = output()
                run_id, step = self.runs.get(name), run.first_step
                try:
                    opened.open(value, run_id=run_id, settings=settings, step=step)
                except OSError as error:
                    reason = f"{flag_of(name)} {value}: {reason_of(error)}"
                    raise UserError(reason, exit_code=1) from error
                self.outputs[name] = opened
        opened = self.outputs.items()
        self.runs |= {name: output.run_id for name, output in opened if output.run_id}

    def on_step(self, step: int, values: dict[str, Any]) -> None:
        for name, output in list(self.outputs.items()):
            if not self._kept(name, step, lambda output=output: output.write(step, values)):
                del self.outputs[name]

    on_evaluation = on_step

    def on_stop(self, failed: bool) -> None:
        for name, output in self.outputs.items():
            self._kept(name, None, lambda output=output: output.close(failed))

    def state_dict(self) -> dict[str, Any]:
        return self.runs

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.runs = convert(state, dict[OutputName, MetricRun], "trainer.json, outputs")

    def _kept(self, name: str, step: int | None, write: Callable[[], None]) -> bool:
        return kept(flag_of(name), step, self.trainer.lost, write, OUTPUTS[name].errors)


class Record(Callback):
    """Writes the losses of --record, on rank 0."""

    def on_start(self) -> None:
        trainer, run = self.trainer, self.trainer.run
        self.directory = run.options.logging.record if is_rank_zero() else None
        if self.directory:
            begin_record(self.directory, run, trainer.model.ctx, trainer.run_id)

    def on_step(self, step: int, values: dict[str, Any]) -> None:
        tokens = self.trainer.tokens
        self._write(Step(step, values["loss"], values["grad_norm"], values["lr"], tokens))

    def on_evaluation(self, step: int, values: dict[str, Any]) -> None:
        losses = {"validation_loss": values.get("eval_loss"), "test_loss": values.get("test_loss")}
        if any(loss is not None for loss in losses.values()):
            self._write(Step(step, **losses))

    def _write(self, step: Step) -> None:
        if self.directory and not kept(
            "--record", step.step, self.trainer.lost, lambda: record_step(self.directory, step)
        ):
            self.directory = None


class Progress(Callback):
    """Prints lines about steps and evaluations, on rank 0."""

    def __init__(self, trainer: "Recorder"):
        super().__init__(trainer)
        run = trainer.run
        interval, steps = run.options.logging.log_interval, run.options.training.steps
        self.lines = StepLines(run.first_step, steps, interval, trainer.token_flops, trainer.peak)

    def on_step(self, step: int, values: dict[str, Any]) -> None:
        trainer = self.trainer
        if trainer.optimizer.skipped:
            print_rank_0(
                f"step {step}: the gradients overflowed, step skipped; "
                f"loss scale {trainer.loss_scale:g}"
            )
        loss, lr, memory = values["loss"], values["lr"], values["peak_memory"]
        seconds, norm = values["step_time"], trainer.norm
        if line := self.lines.line(step, trainer.tokens, seconds, loss, norm, lr, memory):
            print_rank_0(line)

    def on_evaluation(self, step: int, values: dict[str, Any]) -> None:
        steps = self.trainer.run.options.training.steps
        shown = [
            f"{SHOWN.get(name, name.partition('_')[2])} {value:.4f}"
            for name, value in values.items()
            if name not in ("eval_perplexity", "test_perplexity")
        ]
        print_rank_0(f"step {step:>{len(str(steps))}}/{steps}  {'  '.join(shown)}")


class Functions(Callback):
    """Calls the functions that users register with megazoo.on_step, on_evaluation and on_save."""

    def on_step(self, step: int, values: dict[str, Any]) -> None:
        users.after_step(step, values, self.trainer.model)

    def on_evaluation(self, step: int, values: dict[str, Any]) -> None:
        users.after_evaluation(step, values, self.trainer.model)

    def on_save(self, step: int, path: Path) -> None:
        users.after_save(step, path, self.trainer.model)
