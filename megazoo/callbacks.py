"""Callbacks of the training program: custom functions that run after a step, evaluation or save.

A file that --import names registers them with decorators:

    @megazoo.on_step
    def report(step: int, values: dict, model) -> None: ...

Every rank calls every callback, in the order of registration. Callbacks may therefore run the model
and use collectives. Put code for one rank under `if model.ctx.rank == 0`. An exception on any rank
ends the run.
"""

from collections.abc import Callable
from pathlib import Path

from megazoo.errors import UserError

Callback = Callable[[int, dict, object], None]
_steps: list[Callback] = []
_evaluations: list[Callback] = []
_saves: list[Callback] = []


def on_step(function: Callback) -> Callback:
    """Register a function to be called after each step.

    Args:
        function: Called as function(step, values, model). values: the metrics of the step, with
            the names in the metrics file. Times are those of this rank.
    """
    _steps.append(function)
    return function


def on_evaluation(function: Callback) -> Callback:
    """Register a function to be called after each evaluation.

    Args:
        function: Called as function(step, values, model). values: eval_loss, the mean over all
            labelled tokens, and eval_perplexity; test_loss and test_perplexity for the test at the
            end. For a classifier the mean is over rows, and eval_accuracy and (for two labels)
            eval_f1 replace the perplexity.
    """
    _evaluations.append(function)
    return function


def on_save(function: Callback) -> Callback:
    """Register a function to be called when a checkpoint is completely written.

    With --async-save the call happens when the next checkpoint starts or the run ends. The model
    has been trained further by then.

    Args:
        function: Called as function(step, values, model). values: path, the pathlib.Path of the
            checkpoint directory.
    """
    _saves.append(function)
    return function


def after_step(step: int, values: dict, model) -> None:
    """Call the functions of `on_step`."""
    _call(_steps, "a step", step, values, model)


def after_evaluation(step: int, values: dict, model) -> None:
    """Call the functions of `on_evaluation`."""
    _call(_evaluations, "an evaluation", step, values, model)


def after_save(step: int, path: Path, model) -> None:
    """Call the functions of `on_save`."""
    _call(_saves, "a save", step, {"path": path}, model)


def _call(functions: list[Callback], when: str, step: int, values: dict, model) -> None:
    for function in functions:
        try:
            function(step, values, model)
        except UserError as error:
            name = getattr(function, "__name__", repr(function))
            raise UserError(f"{name}, called after {when}: {error}", exit_code=1) from error
