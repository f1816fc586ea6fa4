"""Saving a run, while it waits or in the background: model, optimizer and the trainer's state."""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from megazoo.checkpoint.directories import publish, remove, staging_directory, staging_path
from megazoo.checkpoint.places import step_name
from megazoo.checkpoint.shards import Files, files_of_rank, write_manifest, write_rank
from megazoo.errors import UserError
from megazoo.optim.adamw import AdamW
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.context import ParallelContext


def save(
    directory: str | Path,
    step: int,
    model,
    optimizer: AdamW | None = None,
    trainer: dict | None = None,
    *,
    keep_last: int = 0,
) -> Path:
    """Write `directory/step_...` from all ranks together; returns its path.

    Every (tp, pp) rank writes its parameters once; its dp replicas share the writing of the
    optimizer's state. trainer: JSON for trainer.json. keep_last: how many steps remain in the
    directory, this one included; 0: all. Raises UserError on every rank if one fails; earlier
    checkpoints stay as they were.
    """
    contents = _contents_of_step(step, model, optimizer, trainer)
    return _write_step(Path(directory), step, contents, keep_last)


class Saver:
    """Saves the steps of a run, each while training waits or, in the background, goes on.

    background: `save` only copies this rank's share in memory; a thread writes it. keep_last: as in
    `save`. report: is called, on every rank, with the line "saved PATH" when a step is on disk; in
    the background, by the thread. after: after(step, path) is called on every rank, in the caller's
    thread, when a step is known to be on disk; of one that was saved in the background this is when
    the next begins or the context ends. Use it as a context: at its end the last step is on disk,
    or UserError is raised.
    """

    def __init__(
        self,
        directory: Path,
        model,
        optimizer: AdamW,
        *,
        background: bool = False,
        keep_last: int = 0,
        report: Callable[[str], None] = lambda _: None,
        after: Callable[[int, Path], None] = lambda *_: None,
    ):
        self.directory, self.model, self.optimizer = directory, model, optimizer
        self.background, self.keep_last = background, keep_last
        self.report, self.after = report, after
        self.saved: Path | None = None  # the last step that is on disk
        self._thread: Thread | None = None
        self._error: UserError | None = None
        self._may_fail = False
        self._group = model.ctx.new_cpu_group() if background else None  # the thread's own

    def save(self, step: int, trainer: dict, *, may_fail: bool = False) -> None:
        """Save a step; an earlier one that is still being written is waited for first.

        may_fail: if it fails, warn on stderr; else UserError is raised, on every rank.
        """
        self.wait()
        contents = _contents_of_step(step, self.model, self.optimizer, trainer)
        self._step, self._may_fail = step, may_fail
        if self.background:
            self._thread = Thread(target=self._write, args=(step, contents.copied()))
            self._thread.start()
        else:
            self._write(step, contents)
            self._finish()

    def wait(self) -> None:
        """Wait until the last step is written; if that failed, raise UserError or warn, as
        `may_fail` said."""
        if self._thread:
            self._thread.join()
            self._thread = None
            self._finish()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._may_fail = kind is not None  # what failed first is what is raised
        if kind:
            self.after = lambda *_: None
        self.wait()

    def _write(self, step: int, contents: "_StepContents") -> None:
        try:
            self.saved = _write_step(self.directory, step, contents, self.keep_last, self._group)
            self.report(f"saved {self.saved}")
        except UserError as error:
            self._error = error
        except RuntimeError as error:  # of the process group, when another rank is gone
            self._error = UserError(
                f"step {step} was not saved: {error}; earlier checkpoints are untouched", 1
            )

    def _finish(self) -> None:
        error, self._error = self._error, None
        if error and not self._may_fail:
            raise error
        if error and self.model.ctx.rank == 0:
            print(f"warning: {error}", file=sys.stderr, flush=True)
        if not error:
            self.after(self._step, self.saved)


class _StepContents(NamedTuple):
    """What this rank writes of a step."""

    ctx: ParallelContext
    family: str
    config: object
    files: Files
    trainer: dict
    sidecar_files: dict[str, bytes]

    def copied(self) -> "_StepContents":
        """Return the same, in memory of its own on the CPU."""
        files = {
            file: {
                name: (spec, tensor.detach().to("cpu", copy=True))
                for name, (spec, tensor) in tensors.items()
            }
            for file, tensors in self.files.items()
        }
        return self._replace(files=files)


def _contents_of_step(
    step: int, model, optimizer: AdamW | None, trainer: dict | None
) -> _StepContents:
    states_of = optimizer.whole_states if optimizer else None
    trainer = dict(trainer or {})
    if optimizer:
        trainer["optimizer_steps"] = int(optimizer.steps.item())
    if optimizer and optimizer.loss_scale:
        trainer["loss_scale"] = optimizer.loss_scale.state()
    return _StepContents(
        ctx=model.ctx,
        family=model.family,
        config=model.config,
        files=files_of_rank(model, lambda entry: entry.parameter, states_of),
        trainer={**trainer, "step": step},
        sidecar_files=model.sidecar_files,
    )


def _write_step(
    directory: Path, step: int, contents: _StepContents, keep_last: int, group=None
) -> Path:
    """Write a step from all ranks together; returns its path. group: see `saving_together`."""
    ctx, staging = contents.ctx, staging_path(directory, step)

    def complete() -> None:
        family, config, sidecar_files = contents.family, contents.config, contents.sidecar_files
        write_manifest(staging, family, config, ctx, written, contents.trainer, sidecar_files)
        publish(staging, step, keep_last)

    with saving_together(directory, staging, ctx, group) as run_together:
        run_together(lambda: staging_directory(directory, step), only_rank_zero=True)
        written = run_together(lambda: write_rank(staging, contents.files, ctx))
        run_together(complete, only_rank_zero=True)
    return directory / step_name(step)


@contextmanager
def saving_together(directory: Path, staging: Path, ctx: ParallelContext, group=None):
    """Give a function run_together(work, only_rank_zero=False), which does a part of a save on
    every rank, or on rank 0 alone, and returns what `work` returned on each rank.

    If one rank fails, all raise the same UserError, and `staging`, which was begun, is removed.
    group: the process group over which the ranks report to each other; the world's by default.
    """

    def run_together(work: Callable, only_rank_zero: bool = False) -> list:
        value = error = None
        try:
            value = work() if ctx.rank == 0 or not only_rank_zero else None
        except OSError as problem:
            error = f"can't save to {directory}: {problem.strerror or problem}"
        except UserError as problem:
            error = str(problem)
        outcomes = all_gather_objects((value, error), ctx, group)
        errors = [error for _, error in outcomes if error]
        if errors:
            raise UserError(f"{errors[0]}; earlier checkpoints are untouched", exit_code=1)
        return [value for value, _ in outcomes]

    try:
        yield run_together
    except UserError:
        if ctx.rank == 0:
            remove(staging, ignore_errors=True)
        raise
