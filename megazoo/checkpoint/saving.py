"""Saves a run, synchronously or in the background: model, optimizer and trainer state."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megazoo.checkpoint.copies import Copies
from megazoo.checkpoint.directories import new_step
from megazoo.checkpoint.locks import run_lock
from megazoo.checkpoint.places import step_name
from megazoo.checkpoint.shards import Files, check_rank, files_of_rank, write_manifest, write_rank
from megazoo.checkpoint.writing import LazyTensor
from megazoo.errors import UserError
from megazoo.optim.adamw import AdamW
from megazoo.optim.base import MASTER
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import is_of_communication

UNTOUCHED = "; earlier checkpoints are untouched"


def save(
    directory: str | Path,
    step: int,
    model: Any,
    optimizer: AdamW | None = None,
    trainer: dict | None = None,
    *,
    keep_last: int = 0,
) -> Path:
    """Save a checkpoint of a run, from all ranks together.

    Each (tp, pp) rank writes its parameters once. The ranks along dp and cp share the writing of
    the optimizer state. If weights were copied into the model, such as averages, they also become
    the fp32 weights of the optimizer, and training continues from them.

    Args:
        directory: directory of the run. The checkpoint is its subdirectory `step_00000100`.
        step: number of the training step.
        model: the model.
        optimizer: the optimizer, to resume training; by default only the weights are saved.
        trainer: further state for trainer.json, in types of JSON. The key "run" is the id of the
            run.
        keep_last: number of checkpoints of this run to keep, including this one. 0 keeps all.

    Returns:
        The path of the checkpoint.

    Raises:
        UserError: on every rank, if one of them fails, or another run is saving in the directory.
            Earlier checkpoints are untouched.

    Example:
        megazoo.checkpoint.save("runs/a", step=100, model=model, optimizer=opt, keep_last=2)
    """
    directory = Path(directory)
    with ExitStack() as stack:
        _take_lock(stack, directory, model.ctx)
        contents = _contents_of_step(step, model, optimizer, trainer)
        return _write_step(directory, step, contents, keep_last)


class Saver:
    """Save the checkpoints of a run, synchronously or in the background.

    Use it as a context manager. At the end of the block the last checkpoint is on disk, or
    UserError is raised. Until then no other run can save in the directory.

    Args:
        directory: directory of the run; None if nothing is saved.
        model: the model.
        optimizer: the optimizer.
        background: `save` only copies this rank's tensors in memory; a thread writes them to disk
            while training continues.
        keep_last: number of checkpoints of this run to keep. 0 keeps all.
        format: how a checkpoint is written.
        report: called on every rank with the line "saved PATH" when a checkpoint is on disk; in the
            background, by the thread.
        after: after(step, path) is called on every rank, in the caller's thread, when a checkpoint
            is on disk; in the background, before the next one starts or the block ends.

    Example:
        with megazoo.checkpoint.Saver(Path("runs/a"), model, opt, background=True) as saver:
            for step in range(1, 101):
                ...
                if step % 10 == 0:
                    saver.save(step, {"run": "a"})
    """

    def __init__(
        self,
        directory: Path | None,
        model: Any,
        optimizer: AdamW,
        *,
        background: bool = False,
        keep_last: int = 0,
        format: "Format | None" = None,
        report: Callable[[str], None] = lambda _: None,
        after: Callable[[int, Path], None] = lambda *_: None,
    ):
        self.directory, self.model, self.optimizer = directory, model, optimizer
        self.background, self.keep_last = background, keep_last
        self.format = format or SHARDS
        self.report, self.after = report, after
        self.saved: Path | None = None  # the last step that is on disk
        self._step: int | None = None  # of the last `save`; None if it failed
        self._thread: Thread | None = None
        self._error: UserError | None = None
        self._may_fail = False
        self._group = model.ctx.new_cpu_group() if background else None  # the thread's own
        self._copies = Copies()
        self._lock: ExitStack | None = None

    def save(self, step: int, trainer: dict, *, may_fail: bool = False) -> None:
        """Save a checkpoint, after an earlier one that is still being written.

        Args:
            step: number of the training step.
            trainer: further state for trainer.json, in types of JSON.
            may_fail: print a warning to stderr if saving fails. Otherwise UserError is raised, on
                every rank.
        """
        self.wait()
        self._step, self._may_fail = step, may_fail
        try:
            self._take_lock()
        except UserError as error:
            self._error = error
            return self._finish()
        contents = _contents_of_step(step, self.model, self.optimizer, trainer)
        if self.background:
            copy = self._copied(contents)
            if not self._error:
                self._thread = Thread(target=self._write_in_thread, args=(step, copy))
                self._thread.start()
                return None
        else:
            self._write(step, contents)
        return self._finish()

    def has(self, step: int) -> bool:
        """Return whether the last `save` was of this step, and has written it. Wait until it is
        written."""
        if self._step == step:
            self.wait()
        return self._step == step

    def wait(self) -> None:
        """Wait until the last checkpoint is written. If that failed, warn or raise UserError, by
        its `may_fail`."""
        if self._thread:
            self._thread.join()
            self._thread = None
            self._finish()

    def __enter__(self) -> "Saver":
        self._take_lock()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._may_fail = kind is not None  # raise the first error, not this one
        if kind:
            self.after = lambda *_: None
        try:
            self.wait()
        finally:
            if self._lock:
                self._lock.close()
                self._lock = None

    def _take_lock(self) -> None:
        """Hold the directory's lock until the context ends."""
        if self.directory and not self._lock:
            with ExitStack() as stack:
                _take_lock(stack, Path(self.directory), self.model.ctx)
                self._lock = stack.pop_all()

    def _copied(self, contents: "StepContents") -> "StepContents":
        """Copy a step's contents to the memory of the previous copies. An error on one rank is
        raised on all."""
        ctx, copies = self.model.ctx, []
        assert self.directory  # a run that saves has one
        self._copies.forget()
        try:
            run_together(lambda: copies.append(contents.copied(self._copies)), self.directory, ctx)
        except UserError as error:
            self._error = error
        return copies[0] if copies else contents

    def _write_in_thread(self, step: int, contents: "StepContents") -> None:
        try:
            self._write(step, contents)
        except BaseException as error:  # otherwise the error of a thread would be lost
            self._error = UserError(f"the thread that saves step {step} ended: {told(error)}", 1)

    def _write(self, step: int, contents: "StepContents") -> None:
        assert self.directory  # a run that saves has one
        try:
            self.saved = _write_step(
                self.directory, step, contents, self.keep_last, self.format, self._group
            )
        except UserError as error:
            self._error = error
        except Exception as error:  # of the process group, if another rank has ended
            self._error = UserError(f"step {step} was not saved: {told(error)}{UNTOUCHED}", 1)
        else:
            self.report(f"saved {self.saved}")

    def _finish(self) -> None:
        error, self._error = self._error, None
        if error and not self._may_fail:
            raise error
        if error:
            self._step = None
            if self.model.ctx.rank == 0:
                print(f"warning: {error}", file=sys.stderr, flush=True)
        elif self.saved and self._step is not None:
            self.after(self._step, self.saved)


class StepContents(NamedTuple):
    """The contents of a checkpoint that this rank writes.

    attached: the manifest's entries on what is attached to the model. settings: arguments of the
    optimizer. masters: names of the parameters with fp32 master weights.
    """

    ctx: ParallelContext
    family: str
    config: Any
    files: Files
    trainer: dict
    sidecar_files: dict[str, bytes]
    attached: dict
    settings: dict
    masters: set[str]

    def copied(self, copies: Copies) -> "StepContents":
        """Return a copy in separate memory on the CPU.

        It returns when all copies are complete: later changes of parameters or state don't affect
        them.
        """

        def copy(tensor: torch.Tensor | LazyTensor) -> torch.Tensor | LazyTensor:
            assert isinstance(tensor, torch.Tensor)  # of a model
            return copies.add(tensor)

        files = {
            file: {name: (spec, copy(tensor)) for name, (spec, tensor) in tensors.items()}
            for file, tensors in self.files.items()
        }
        copies.wait()
        return self._replace(files=files)


def _contents_of_step(
    step: int, model, optimizer: AdamW | None, trainer: dict | None
) -> StepContents:
    states_of = optimizer.whole_states if optimizer else None
    trainer = dict(trainer or {})
    if optimizer:
        optimizer.masters.refresh(optimizer)
        trainer["optimizer_steps"] = int(optimizer.steps.item())
    if optimizer and optimizer.loss_scale:
        trainer["loss_scale"] = optimizer.loss_scale.state()
    return StepContents(
        ctx=model.ctx,
        family=model.family,
        config=model.config,
        files=files_of_rank(model, states_of),
        trainer={**trainer, "step": step},
        sidecar_files=model.sidecar_files,
        attached=model.attached.entries_for_manifest(model) if model.attached else {},
        settings=_settings_of(optimizer) if optimizer else {},
        masters={name for name, states in optimizer.state.items() if MASTER in states}
        if optimizer
        else set(),
    )


def _settings_of(optimizer: AdamW) -> dict[str, Any]:
    """Return the arguments of AdamW for the parameters with weight decay."""
    group = optimizer.param_groups[0]
    names = ("lr", "betas", "eps", "weight_decay")
    return {name: group[name] for name in names if name in group}


class Format(NamedTuple):
    """How the checkpoint of a step is written.

    write_rank: write_rank(directory, contents) writes a rank's files, and returns a dictionary with
    the "files" and "stamps" that `check_rank` needs. complete: complete(directory, contents,
    written) writes the rest on rank 0, last the file that makes the checkpoint complete. written:
    the results of `write_rank` of all ranks.
    """

    write_rank: Callable[[Path, StepContents], dict]
    complete: Callable[[Path, StepContents, list[dict]], None]


def _complete_shards(directory: Path, contents: StepContents, written: list[dict]) -> None:
    write_manifest(
        directory,
        contents.family,
        contents.config,
        contents.ctx,
        written,
        contents.trainer,
        contents.sidecar_files,
        contents.attached,
    )


SHARDS = Format(
    lambda directory, contents: write_rank(directory, contents.files, contents.ctx),
    _complete_shards,
)


def _take_lock(stack: ExitStack, directory: Path, ctx: ParallelContext) -> None:
    """Hold a directory's lock on rank 0 until the stack is closed.

    A directory that was created for it is removed then if it is still empty. UserError, on every
    rank, if another run holds the lock.
    """

    def take() -> None:
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            stack.callback(_remove_if_empty, directory)
        stack.enter_context(run_lock(directory))

    run_together(take, directory, ctx, only_rank_zero=True)


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):  # the directory is not empty
        directory.rmdir()


def _write_step(
    directory: Path,
    step: int,
    contents: StepContents,
    keep_last: int,
    format: Format = SHARDS,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint from all ranks, and return its path. group: see `run_together`."""
    write_together(
        directory,
        contents.ctx,
        begin=lambda: new_step(directory, step, keep_last, contents.trainer.get("run")),
        files=lambda: contents.files,
        write=lambda staging, _: format.write_rank(staging, contents),
        complete=lambda staging, written: format.complete(staging, contents, written),
        group=group,
    )
    return directory / step_name(step)


def write_together(
    directory: Path,
    ctx: ParallelContext,
    *,
    begin: Callable[[], AbstractContextManager[Path]],
    files: Callable[[], Files],
    complete: Callable[[Path, list[dict]], None],
    write: Callable[[Path, Files], dict] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a directory from all ranks. If one rank fails, all raise the same UserError, and rank 0
    removes the incomplete directory.

    Args:
        directory: directory to write.
        ctx: parallel context.
        begin: returns, on rank 0, the context manager in which the directory is written. Its value
            is the temporary path.
        files: returns, on each rank, the files that this rank writes: see `write_rank`.
        write: write(path, files) writes them, and returns a dictionary as `write_rank`, which is
            the default.
        complete: complete(path, written) is called on rank 0, after each rank has checked its
            files. written: the results of `write_rank` of all ranks.
        group: see `run_together`.
    """
    run = partial(run_together, directory=directory, ctx=ctx, group=group)
    with ExitStack() as stack:
        staging, *_ = run(lambda: stack.enter_context(begin()), only_rank_zero=True)
        mine = files()
        written = run(lambda: write(staging, mine) if write else write_rank(staging, mine, ctx))
        run(lambda: check_rank(staging, written[ctx.rank]))

        def end() -> None:
            complete(staging, written)
            stack.close()

        run(end, only_rank_zero=True)


def run_together(
    work: Callable,
    directory: Path,
    ctx: ParallelContext,
    group: dist.ProcessGroup | None = None,
    *,
    only_rank_zero: bool = False,
) -> list:
    """Run `work` on every rank, or only on rank 0; return its results of all ranks.

    If one rank fails, all raise the same UserError. group: process group in which the ranks
    exchange their results; by default that of the world.
    """
    value = error = cause = None
    try:
        value = work() if ctx.rank == 0 or not only_rank_zero else None
    except Exception as problem:
        error, cause = told(problem), problem
        if not isinstance(problem, UserError):
            error = f"can't save to {directory}: {error}"
    outcomes = all_gather_objects((value, error), ctx, group)
    errors = [error for _, error in outcomes if error]
    if errors:
        raise UserError(f"{errors[0]}{UNTOUCHED}", exit_code=1) from cause
    return [value for value, _ in outcomes]


def told(error: BaseException) -> str:
    """Return the text of an error, with its type unless the text is clear without it."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, UserError) or (
        isinstance(error, RuntimeError) and is_of_communication(error)
    ):
        return str(error)
    return f"{type(error).__name__}: {error}"
