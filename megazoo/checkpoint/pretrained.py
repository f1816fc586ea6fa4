"""Models from checkpoints and Hugging Face directories, and back: what users call."""

import shutil
from pathlib import Path

import torch

from megazoo.checkpoint.convert import open_source, write_hugging_face
from megazoo.checkpoint.format import MANIFEST, replaced_directory
from megazoo.checkpoint.reader import Checkpoint
from megazoo.checkpoint.save import together, write_manifest, write_rank
from megazoo.errors import UserError
from megazoo.models.base import Model
from megazoo.parallel.context import ParallelContext, current_context


def from_pretrained(
    path: str | Path, ctx: ParallelContext | None = None, *, dtype: torch.dtype | None = None, seed: int = 0
) -> Model:
    """This rank's part of a model that is on disk; each rank reads only what it owns, straight into its parameters.

    path: a checkpoint of any layout, or a Hugging Face directory. ctx: the ambient context by default. dtype: as it
    is stored, by default. seed: of the dropout. Raises UserError, with what is wrong, if it can't be read or cut.
    """
    source = open_source(path)
    names = source.model.on_meta(source.model_config, ParallelContext()).entries()
    dtype = dtype or source.dtype_of(next(names).name)
    model = source.model.empty(source.model_config, ctx or current_context(), dtype=dtype, seed=seed)
    load_weights(source, model)
    return model


@torch.no_grad()
def load_weights(source, model: Model) -> None:
    """Fill this rank's parameters from an open source, whose config must be the model's."""
    for entry in model.entries():
        source.read_into(entry.name, entry.parameter, entry.spec, model.ctx)


def save_parallelized(
    model: Model, directory: str | Path, *, merge_checkpoints: bool = False, max_shard_size: int = 5 * 10**9
) -> None:
    """Write a model from all ranks together, in place of what megazoo wrote there before.

    As shards, one file for each (tp, pp) rank; or with merge_checkpoints as a Hugging Face directory, in files of
    max_shard_size bytes at most. Raises UserError on every rank if one fails.
    """
    ctx, directory = model.ctx, Path(directory)
    ctx.require_ranks()
    shards = directory.parent / f".{directory.name}.shards" if merge_checkpoints else directory
    staging = shards.parent / f".{shards.name}.writing"

    def begin() -> None:
        _check_ours(directory)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)

    def complete() -> None:
        write_manifest(staging, model.config, ctx, written, {})
        with replaced_directory(shards) as new:
            new.rmdir()
            staging.rename(new)
        if merge_checkpoints:
            write_hugging_face(Checkpoint(shards), directory, max_shard_size=max_shard_size, overwrite=True)
            shutil.rmtree(shards)

    together(ctx, directory, begin if ctx.rank == 0 else lambda: None)
    written = together(ctx, directory, lambda: write_rank(staging, model, lambda e: e.parameter), staging)
    together(ctx, directory, complete if ctx.rank == 0 else lambda: None, staging)


def _check_ours(directory: Path) -> None:
    """Refuse to replace a directory that megazoo didn't write."""
    if not directory.is_dir() or not any(directory.iterdir()) or (directory / MANIFEST).is_file():
        return
    weights = sorted(directory.glob("model*.safetensors"))
    if not weights or b'"writer":"megazoo"' not in weights[0].read_bytes()[:1000]:
        raise UserError(f"{directory} is not empty, and not of megazoo's writing: choose another")
