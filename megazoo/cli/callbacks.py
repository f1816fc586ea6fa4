"""Calls functions of a user's own after a step, an evaluation or a save of the training program.

A file that --import names registers them with decorators:

    @megazoo.on_step
    def tell(step: int, values: dict, model) -> None: ...

Every rank calls each, in the order of registration, so that they may use the model, which all ranks
run together, or other collectives. What is for one rank stands under `if model.ctx.rank == 0`. An
exception, on any rank, ends the run.
"""

from collections.abc import Callable
from pathlib import Path

from megazoo.errors import UserError

Callback = Callable[[int, dict, object], None]
_steps: list[Callback] = []
_evaluations: list[Callback] = []
_saves: list[Callback] = []


def on_step(function: Callback) -> Callback:
    """Register function(step, values, model), to be called after each step.

    values: the numbers of the step's line in the metrics file, by their names there; times are this
    rank's own.
    """
    _steps.append(function)
    return function


def on_evaluation(function: Callback) -> Callback:
    """Register function(step, values, model), to be called after each evaluation.

    values: eval_loss, the mean over all labelled tokens, and eval_perplexity; of the test at the
    end test_loss and test_perplexity. Of a classifier the mean is over rows, and instead of the
    perplexity there are eval_accuracy and, for two labels, eval_f1.
    """
    _evaluations.append(function)
    return function


def on_save(function: Callback) -> Callback:
    """Register function(step, values, model), to be called when a checkpoint is on disk, whole.

    values: path, the pathlib.Path of its directory. Of a checkpoint that is written in the
    background (--async-save) this is when the next one begins or the run ends: then all ranks know
    of it. `model` has trained on until then.
    """
    _saves.append(function)
    return function


def after_step(step: int, values: dict, model) -> None:
    """Call what `on_step` registered."""
    _call(_steps, "a step", step, values, model)


def after_evaluation(step: int, values: dict, model) -> None:
    """Call what `on_evaluation` registered."""
    _call(_evaluations, "an evaluation", step, values, model)


def after_save(step: int, path: Path, model) -> None:
    """Call what `on_save` registered."""
    _call(_saves, "a save", step, {"path": path}, model)


def _call(functions: list[Callback], when: str, step: int, values: dict, model) -> None:
    for function in functions:
        try:
            function(step, values, model)
        except UserError as error:
            name = getattr(function, "__name__", repr(function))
            raise UserError(f"{name}, called after {when}: {error}", exit_code=1) from error
