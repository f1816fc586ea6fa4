"""Saving and loading a run: model, optimizer and the trainer's state, from any layout into any
layout."""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import torch

from megazoo.checkpoint.format import (
    FORMAT_VERSION,
    Lazy,
    manifest_checksum,
    publish,
    remove,
    staging_directory,
    write_atomically,
    write_json,
    write_safetensors,
)
from megazoo.checkpoint.places import MANIFEST, TRAINER, step_name
from megazoo.checkpoint.reader import Checkpoint, describe
from megazoo.errors import UserError
from megazoo.optim.adamw import MASTER, AdamW
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import failing_together
from megazoo.parallel.module import Entry
from megazoo.parallel.shard import ParameterSpec


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
    optimizer's state.
    trainer: JSON for trainer.json. keep_last: how many steps remain in the directory, this one
    included; 0: all.
    Raises UserError on every rank if one fails; earlier checkpoints stay as they were.
    """
    contents = _contents(step, model, optimizer, trainer)
    return _write_step(Path(directory), step, contents, keep_last)


class Saver:
    """Saves the steps of a run, each at once or, in the background, while training goes on.

    background: `save` only copies this rank's share in memory; a thread writes it. keep_last: as in
    `save`. say: is told of every step that was saved. after: after(step, path) is called on every
    rank, in the caller's thread, when a step is known to be on disk; of one that was saved in the
    background this is when the next begins or the context ends. Use it as a context: at its end the
    last step is on disk, or UserError is raised.
    """

    def __init__(
        self,
        directory: Path,
        model,
        optimizer: AdamW,
        *,
        background: bool = False,
        keep_last: int = 0,
        say: Callable[[str], None] = lambda _: None,
        after: Callable[[int, Path], None] = lambda *_: None,
    ):
        self.directory, self.model, self.optimizer = directory, model, optimizer
        self.background, self.keep_last, self.say, self.after = background, keep_last, say, after
        self.saved: Path | None = None  # the last step that is on disk
        self._thread: Thread | None = None
        self._error: UserError | None = None
        self._may_fail = False
        self._group = model.ctx.new_cpu_group() if background else None  # the thread's own

    def save(self, step: int, trainer: dict, *, may_fail: bool = False) -> None:
        """Save a step; an earlier one that is still being written is waited for first.

        may_fail: should it fail, that is told on stderr; else UserError is raised, on every rank.
        """
        self.wait()
        contents = _contents(step, self.model, self.optimizer, trainer)
        self._step, self._may_fail = step, may_fail
        if self.background:
            self._thread = Thread(target=self._write, args=(step, contents.copied()))
            self._thread.start()
        else:
            self._write(step, contents)
            self._report()

    def wait(self) -> None:
        """Wait until the last step is written; raises or tells what failed."""
        if self._thread:
            self._thread.join()
            self._thread = None
            self._report()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._may_fail = kind is not None  # what failed first is what is raised
        if kind:
            self.after = lambda *_: None
        self.wait()

    def _write(self, step: int, contents: "_Contents") -> None:
        try:
            self.saved = _write_step(self.directory, step, contents, self.keep_last, self._group)
            self.say(f"saved {self.saved}")
        except UserError as error:
            self._error = error
        except RuntimeError as error:  # of the process group, when another rank is gone
            self._error = UserError(
                f"step {step} was not saved: {error}; earlier checkpoints are untouched", 1
            )

    def _report(self) -> None:
        error, self._error = self._error, None
        if error and not self._may_fail:
            raise error
        if error and self.model.ctx.rank == 0:
            print(f"warning: {error}", file=sys.stderr, flush=True)
        if not error:
            self.after(self._step, self.saved)


def load(checkpoint: Checkpoint, model, optimizer: AdamW | None = None) -> dict:
    """Fill this rank's parameters and optimizer state from a checkpoint of any layout; returns the
    trainer's state."""

    def best_weights(entry: Entry, dtype: torch.dtype) -> str:
        """The name under which a parameter stands in the checkpoint, in fp32 if it is there and
        wanted."""
        master = f"{entry.name}.{MASTER}"
        return master if dtype == torch.float32 and master in checkpoint.tensors else entry.name

    if optimizer:
        with failing_together(model.ctx):
            _check_states(checkpoint, optimizer)
    for entry in model.entries():
        name = best_weights(entry, entry.parameter.dtype)
        checkpoint.read_into(name, entry.parameter, entry.spec, model.ctx)
    if optimizer:
        for entry in optimizer.entries:
            for state, tensor in optimizer.state[entry.name].items():
                name = (
                    best_weights(entry, tensor.dtype)
                    if state == MASTER
                    else f"{entry.name}.{state}"
                )
                checkpoint.read_range(name, tensor, optimizer.ranges[entry.name], entry, model.ctx)
        optimizer.steps.fill_(checkpoint.trainer["optimizer_steps"])
        if optimizer.loss_scale and "loss_scale" in checkpoint.trainer:
            optimizer.loss_scale.load(checkpoint.trainer["loss_scale"])
    model.sidecar_files = checkpoint.sidecar_files if model.ctx.rank == 0 else {}
    model.generation = checkpoint.generation
    return checkpoint.trainer


def _check_states(checkpoint: Checkpoint, optimizer: AdamW) -> None:
    """Raise UserError if the checkpoint lacks the state of a parameter that is trained."""
    missing = [entry.name for entry in optimizer.entries if not checkpoint.states_of(entry.name)]
    if missing and not checkpoint.has_states:
        raise UserError(f"{checkpoint.path} has no optimizer state: load its weights alone")
    if missing:
        what = f"{checkpoint.path} has no optimizer state of {missing[0]}: it was frozen then"
        raise UserError(f"{what}; freeze the same, or start a new run with the weights alone")


# What a rank writes.

Files = dict[str, dict[str, tuple[ParameterSpec, torch.Tensor | Lazy]]]
# The optimizer's states of a parameter, for the replica that writes them; the others may be called
# to help with them.
StatesOf = Callable[[Entry, int], dict[str, torch.Tensor | Lazy]]


def files_of_rank(
    model, weight_of: Callable[[Entry], torch.Tensor | Lazy], states_of: StatesOf | None
) -> Files:
    """A rank's files and their tensors, by their global names. A file's name has {tp} where the tp
    rank stands."""
    ctx = model.ctx
    # the same on all tp ranks
    owned = [entry for entry in model.entries() if entry.stages[0] == ctx.pp_rank]
    entries = [entry for entry in owned if entry.spec.shard or ctx.tp_rank == 0]
    place, files = f"tp_{{tp}}_pp_{ctx.pp_rank}", {}
    if ctx.dp_rank == 0:
        files[f"model_{place}.safetensors"] = {e.name: (e.spec, weight_of(e)) for e in entries}
    if states_of:
        writers = dict(
            zip((entry.name for entry in owned), _writers(owned, ctx.dp_size), strict=True)
        )
        states = {}
        for e in entries:
            tensors = states_of(e, writers[e.name])
            if writers[e.name] == ctx.dp_rank:
                states |= {
                    f"{e.name}.{state}": (e.spec, tensor) for state, tensor in tensors.items()
                }
        files[f"optimizer_{place}_dp_{ctx.dp_rank}.safetensors"] = states
    return files


def write_rank(directory: Path, files: Files, ctx: ParallelContext) -> dict:
    """Write one rank's files; returns their sizes and checksums, and the manifest's lines of its
    tensors."""
    infos, lines = {}, {}
    for pattern, tensors in files.items():
        name = pattern.format(tp=ctx.tp_rank)
        infos[name] = write_safetensors(
            directory / name, {n: tensor for n, (_, tensor) in tensors.items()}
        )
        lines |= {n: describe(spec, tensor.dtype, pattern) for n, (spec, tensor) in tensors.items()}
    return {"files": infos, "tensors": lines}


def write_manifest(
    directory: Path,
    family: str,
    config,
    ctx: ParallelContext,
    written: list[dict],
    trainer: dict,
    sidecar_files: dict[str, bytes],
) -> None:
    """Write trainer.json, the sidecar_files and, last of all, the manifest of what every rank has
    written."""
    files = {name: info for part in written for name, info in part["files"].items()}
    tensors = {name: line for part in written for name, line in part["tensors"].items()}
    files[TRAINER] = write_json(directory / TRAINER, trainer)
    files |= {
        name: write_atomically(directory / name, data) for name, data in sidecar_files.items()
    }
    layout = {"tp": ctx.tp_size, "pp": ctx.pp_size, "dp": ctx.dp_size}
    manifest = {
        "format": FORMAT_VERSION,
        "family": family,
        "config": asdict(config),
        "layout": layout,
    }
    manifest |= {"files": files, "tensors": tensors}
    write_json(directory / MANIFEST, {**manifest, "crc32": manifest_checksum(manifest)})


class _Contents(NamedTuple):
    """What this rank writes of a step."""

    ctx: ParallelContext
    family: str
    config: object
    files: Files
    trainer: dict
    sidecar_files: dict[str, bytes]

    def copied(self) -> "_Contents":
        """The same, in memory of its own on the CPU."""
        files = {
            file: {
                name: (spec, tensor.detach().to("cpu", copy=True))
                for name, (spec, tensor) in tensors.items()
            }
            for file, tensors in self.files.items()
        }
        return self._replace(files=files)


def _contents(step: int, model, optimizer: AdamW | None, trainer: dict | None) -> _Contents:
    files = files_of_rank(
        model, lambda entry: entry.parameter, optimizer and optimizer.whole_states
    )
    steps = {"optimizer_steps": int(optimizer.steps.item())} if optimizer else {}
    if optimizer and optimizer.loss_scale:
        steps["loss_scale"] = optimizer.loss_scale.state()
    return _Contents(
        model.ctx,
        model.family,
        model.config,
        files,
        {**(trainer or {}), **steps, "step": step},
        model.sidecar_files,
    )


def _write_step(
    directory: Path, step: int, contents: _Contents, keep_last: int, group=None
) -> Path:
    ctx, staging = contents.ctx, directory / f".{step_name(step)}.partial"

    def complete() -> None:
        write_manifest(
            staging,
            contents.family,
            contents.config,
            ctx,
            written,
            contents.trainer,
            contents.sidecar_files,
        )
        publish(staging, step, keep_last)

    with saving(directory, staging, ctx, group) as together:
        together(lambda: staging_directory(directory, step), only_rank_zero=True)
        written = together(lambda: write_rank(staging, contents.files, ctx))
        together(complete, only_rank_zero=True)
    return directory / step_name(step)


@contextmanager
def saving(directory: Path, staging: Path, ctx: ParallelContext, group=None):
    """Gives a function that does a part of a save on every rank, or on one, and returns what each
    rank's work returned.

    If one rank fails, all raise the same UserError, and what was begun is removed. group: to talk
    over; the world's.
    """

    def together(work: Callable, only_rank_zero: bool = False) -> list:
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
        yield together
    except UserError:
        if ctx.rank == 0:
            remove(staging, ignore_errors=True)
        raise


def _writers(entries: list[Entry], dp_size: int) -> list[int]:
    """Which replica writes each parameter's optimizer state: contiguous shares of about equal size."""
    sizes = [torch.Size(entry.spec.shape).numel() for entry in entries]
    total, before, writers = sum(sizes), 0, []
    for size in sizes:
        writers.append((2 * before + size) * dp_size // (2 * total))
        before += size
    return writers
