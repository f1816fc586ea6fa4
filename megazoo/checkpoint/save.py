"""Saving and loading a run: model, optimizer and the trainer's state, from any layout into any layout."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from megazoo.checkpoint.format import (
    FORMAT_VERSION,
    MANIFEST,
    TRAINER,
    Lazy,
    publish,
    remove,
    staging_directory,
    step_name,
    write_json,
    write_safetensors,
)
from megazoo.checkpoint.reader import Checkpoint, describe
from megazoo.errors import UserError
from megazoo.models import family_of
from megazoo.models.base import Entry
from megazoo.optim import MASTER, AdamW
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.context import ParallelContext


def save(directory: str | Path, step: int, model, optimizer: AdamW | None = None, trainer: dict | None = None) -> Path:
    """Write `directory/step_...` from all ranks together; returns its path.

    Every (tp, pp) rank writes its parameters once; its dp replicas share the writing of the optimizer's state.
    trainer: JSON for trainer.json. Raises UserError on every rank if one fails; earlier checkpoints stay as they were.
    """
    ctx, directory = model.ctx, Path(directory)
    staging = directory / f".{step_name(step)}.partial"
    if ctx.rank == 0:
        together(ctx, directory, lambda: staging_directory(directory, step))
    else:
        together(ctx, directory, lambda: None)
    states = (lambda entry: optimizer.state[entry.name]) if optimizer else None
    written = together(ctx, directory, lambda: write_rank(staging, model, lambda e: e.parameter, states), staging)

    def complete() -> None:
        steps = {"optimizer_steps": int(optimizer.steps.item())} if optimizer else {}
        if optimizer and optimizer.loss_scale:
            steps["loss_scale"] = optimizer.loss_scale.state()
        write_manifest(staging, model.config, ctx, written, {**(trainer or {}), **steps, "step": step})
        publish(staging, step)

    together(ctx, directory, complete if ctx.rank == 0 else lambda: None, staging)
    return directory / step_name(step)


def load(checkpoint: Checkpoint, model, optimizer: AdamW | None = None) -> dict:
    """Fill this rank's parameters and optimizer state from a checkpoint of any layout; returns the trainer's state."""

    def best_weights(entry: Entry, dtype: torch.dtype) -> str:
        """The name under which a parameter stands in the checkpoint, in fp32 if it is there and wanted."""
        master = f"{entry.name}.{MASTER}"
        return master if dtype == torch.float32 and master in checkpoint.tensors else entry.name

    for entry in model.entries():
        with torch.no_grad():
            name = best_weights(entry, entry.parameter.dtype)
            checkpoint.read_into(name, entry.parameter, entry.spec, model.ctx)
    if optimizer:
        for entry in optimizer.entries:
            for state, tensor in optimizer.state[entry.name].items():
                name = best_weights(entry, tensor.dtype) if state == MASTER else f"{entry.name}.{state}"
                checkpoint.read_into(name, tensor, entry.spec, model.ctx)
        optimizer.steps.fill_(checkpoint.trainer["optimizer_steps"])
        if optimizer.loss_scale and "loss_scale" in checkpoint.trainer:
            optimizer.loss_scale.load(checkpoint.trainer["loss_scale"])
    return checkpoint.trainer


def write_rank(
    directory: Path,
    model,
    weight_of: Callable[[Entry], torch.Tensor | Lazy],
    states_of: Callable[[Entry], dict[str, torch.Tensor | Lazy]] | None = None,
) -> dict:
    """Write one rank's files; returns their sizes and checksums, and the manifest's lines of its tensors."""
    ctx, files, lines = model.ctx, {}, {}
    owned = [entry for entry in model.entries() if entry.stages[0] == ctx.pp_rank]  # the same on all tp ranks
    entries = [entry for entry in owned if entry.spec.shard or ctx.tp_rank == 0]
    place = f"tp_{{tp}}_pp_{ctx.pp_rank}"

    def write(pattern: str, tensors: dict[str, tuple[Entry, torch.Tensor | Lazy]]) -> None:
        name = pattern.format(tp=ctx.tp_rank)
        files[name] = write_safetensors(directory / name, {n: t for n, (_, t) in tensors.items()})
        lines.update({n: describe(entry.spec, t.dtype, pattern) for n, (entry, t) in tensors.items()})

    if ctx.dp_rank == 0:
        write(f"model_{place}.safetensors", {entry.name: (entry, weight_of(entry)) for entry in entries})
    if states_of:
        writers = dict(zip((entry.name for entry in owned), _writers(owned, ctx.dp_size), strict=True))
        mine = [entry for entry in entries if writers[entry.name] == ctx.dp_rank]
        states = {f"{e.name}.{state}": (e, t) for e in mine for state, t in states_of(e).items()}
        write(f"optimizer_{place}_dp_{ctx.dp_rank}.safetensors", states)
    return {"files": files, "tensors": lines}


def write_manifest(directory: Path, config, ctx: ParallelContext, written: list[dict], trainer: dict) -> None:
    """Write trainer.json and, last of all, the manifest of what every rank has written."""
    files = {name: info for part in written for name, info in part["files"].items()}
    tensors = {name: line for part in written for name, line in part["tensors"].items()}
    files[TRAINER] = write_json(directory / TRAINER, trainer)
    layout = {"tp": ctx.tp_size, "pp": ctx.pp_size, "dp": ctx.dp_size}
    manifest = {"format": FORMAT_VERSION, "family": family_of(config), "config": asdict(config), "layout": layout}
    write_json(directory / MANIFEST, {**manifest, "files": files, "tensors": tensors})


def _writers(entries: list[Entry], dp_size: int) -> list[int]:
    """Which replica writes each parameter's optimizer state: contiguous shares of about equal size."""
    sizes = [torch.Size(entry.spec.shape).numel() for entry in entries]
    total, before, writers = sum(sizes), 0, []
    for size in sizes:
        writers.append((2 * before + size) * dp_size // (2 * total))
        before += size
    return writers


def together(ctx: ParallelContext, directory: Path, work, staging: Path | None = None) -> list:
    """Do a part of a save on every rank; if one fails, all raise the same UserError, and what was begun is removed."""
    try:
        value, error = work(), None
    except OSError as problem:
        value, error = None, f"can't save to {directory}: {problem.strerror or problem}"
    except UserError as problem:
        value, error = None, str(problem)
    outcomes = all_gather_objects((value, error), ctx)
    errors = [error for _, error in outcomes if error]
    if errors:
        if staging and ctx.rank == 0:
            remove(staging)
        raise UserError(f"{errors[0]}; earlier checkpoints are untouched", exit_code=1)
    return [value for value, _ in outcomes]
