"""Models from checkpoints and Hugging Face directories, and back: what users call."""

from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megazoo.checkpoint.directories import output_directory
from megazoo.checkpoint.ownership import foreign_entry
from megazoo.checkpoint.places import (
    CONFIG,
    MANIFEST,
    TRAINER,
    NoCheckpoint,
    find_checkpoint,
    named_directory,
)
from megazoo.checkpoint.saving import write_together
from megazoo.checkpoint.shards import Files, files_of_rank, write_manifest
from megazoo.checkpoint.verifying import verifying
from megazoo.errors import UserError
from megazoo.gguf_file import is_gguf
from megazoo.hub import name_of
from megazoo.layers.linear import refuse_rounded
from megazoo.models.gguf.source import GGUFModel
from megazoo.models.hugging_face.directory import HuggingFaceDirectory
from megazoo.models.hugging_face.export import hugging_face_config, parse_size, write_model
from megazoo.models.megatron.source import MegatronCheckpoint, is_megatron
from megazoo.models.outputs import CLASSIFIER_HEAD
from megazoo.models.registry import GIVE_A_DIRECTORY, presets
from megazoo.models.source import ModelSource, SavedModel
from megazoo.parallel.context import ParallelContext, current_context
from megazoo.parallel.dtypes import dtype_named
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.module import NamedParameter, initialize
from megazoo.parallel.random import derive_seed
from megazoo.terminal import byte_bar

if TYPE_CHECKING:
    from megazoo.models.base import Model


def open_source(path: str | Path, *, verify: bool = True) -> ModelSource:
    """Open a checkpoint of ours, a Hugging Face directory (one with a config.json), or a checkpoint
    of Megatron-LM. UserError if it is none of them; HoldsAdapters, which says what to do, for a
    checkpoint that holds adapters alone.

    path: a directory, or org/name[@revision] on the Hugging Face hub. verify: compare what is read
    with the checkpoint's checksums; the others have none.
    """
    path = named_directory(path)
    if is_gguf(path):
        return GGUFModel(path)
    if not (path / MANIFEST).is_file():
        if is_megatron(path):
            return MegatronCheckpoint(path)
        if (path / CONFIG).is_file():
            return HuggingFaceDirectory(path)
    try:
        step = find_checkpoint(path)
    except NoCheckpoint as error:
        is_there = path.is_dir()
        raise UserError(
            f"{error}, nor {CONFIG}" if is_there else f"{path} is not a directory"
        ) from None
    return SavedModel(step, verify=verify)


def from_pretrained(
    path: str | Path,
    ctx: ParallelContext | None = None,
    *,
    dtype: torch.dtype | str | None = "auto",
    seed: int = 0,
    num_labels: int | None = None,
    pad_token_id: int | None = None,
    verify: bool = True,
) -> "Model":
    """Build this rank's part of a model that is on disk; each rank reads only what it owns,
    straight into its parameters. The model is in evaluation mode until `train_batch` or `train()`.

    path: a checkpoint of any layout, a Hugging Face directory, or org/name[@revision] on the
    Hugging Face hub, which is downloaded into its cache. ctx: the ambient context by
    default. dtype: of the weights: a torch.dtype, or its name such as "bfloat16" or "bf16"; by
    default "auto", the stored one. seed: of the dropout. num_labels: make a classifier of sequences
    of it; the head of a language model gives way to one that is drawn from the seed. pad_token_id:
    of such a classifier, if the files don't say it. verify: compare what is read with the
    checkpoint's checksums, beside the reading. Every rank of the context calls it. Raises
    UserError, with what is wrong, if it can't be read or cut.
    """
    ctx = ctx or current_context()
    with propagate_errors(ctx):
        given = dtype_named(dtype)
        source = open_directory(path, verify=verify)
        config = with_labels(source, num_labels, pad_token_id)
        dtype = given or source.dtype_of(next(iter(source.specs)))
        model = source.model.empty(config, ctx, dtype=dtype, seed=seed)
        load_weights(source, model)
    return model.eval()


def with_labels(
    source: ModelSource, num_labels: int | None, pad_token_id: int | None = None
) -> Any:
    """Return the config of a source, or of the classifier that is made of it; UserError if it is
    one of other labels, or of a family without classifiers. Arguments: see `from_pretrained`."""
    config = source.config
    if num_labels is None or num_labels == config.num_labels:
        return config
    if config.num_labels:
        raise UserError(
            f"{source.path} is a classifier of {config.num_labels} labels, not {num_labels}"
        )
    if missing := {"num_labels", "pad_token_id"} - {f.name for f in fields(config)}:
        raise UserError(f"{type(config).__name__} has no {min(missing)}: it makes no classifier")
    pad = source.pad_token_id if pad_token_id is None else pad_token_id
    return replace(config, num_labels=num_labels, pad_token_id=pad)


def from_parallelized(
    path: str | Path | None = None,
    ctx: ParallelContext | None = None,
    *,
    load_directory: str | Path | None = None,
    **options: Any,
) -> "Model":
    """Build this rank's part of a model that is on disk: `from_pretrained`, which reads checkpoints
    of any layout, too.

    load_directory: OSLO's name for path. options: as in `from_pretrained`.
    """
    directory = one_of("from_parallelized", path, "load_directory", load_directory)
    return from_pretrained(directory, ctx, **options)


def open_directory(path: str | Path, *, verify: bool = True) -> ModelSource:
    """Open a directory that a user has named for its weights; UserError says what to do if there is
    none. verify: see `open_source`."""
    if isinstance(path, torch.nn.Module):
        raise UserError(GIVE_A_DIRECTORY)
    if not isinstance(path, str | Path):
        raise UserError(
            f"weights are read from a directory, not from {type(path).__name__}: "
            "for random ones, megazoo.from_config"
        )
    if not named_directory(path).exists():
        is_preset = str(path) in presets()
        random = f"; for random weights call megazoo.from_config({str(path)!r}, ctx)"
        raise UserError(
            f"{path} is not a directory: there is no {Path(path).absolute()}; "
            "give one that holds a checkpoint, or what transformers' save_pretrained wrote"
            f"{random if is_preset else ''}"
        )
    return open_source(path, verify=verify)


def one_of(function: str, directory: Any, name: str, named: Any) -> Any:
    """Return the directory that a function was given, by position or by OSLO's name for it;
    UserError for both."""
    if (directory is None) == (named is None):
        problem = "gets its directory twice" if named is not None else "needs a directory"
        raise UserError(
            f"{function} {problem}: give {function}(DIRECTORY) or {function}({name}=DIRECTORY)"
        )
    return named if directory is None else directory


def load_weights(source: ModelSource, model: Any) -> None:
    """Fill this rank's parameters from an open source; its sidecar files travel on.

    A classifier takes a language model's weights, too; its head is then drawn from the model's
    seed. Every rank calls it. UserError if the weights are another model's, or a file has changed
    since it was written.
    """
    with propagate_errors(model.ctx):
        refuse_rounded(model, "loaded")
        entries = _entries_to_read(source, model)
        files = source.files_of([(entry.name, entry.spec) for entry in entries], model.ctx)
        size = sum(entry.parameter.nbytes for entry in entries)
        with verifying(source, files, model.ctx), byte_bar(size, "load") as bar:
            for entry in entries:
                source.read_into(entry.name, entry.parameter, entry.spec, model.ctx)
                bar.update(entry.parameter.nbytes)
            model.sidecar_files = source.sidecar_files if model.ctx.rank == 0 else {}
            model.generation = source.generation
            model.weights_path = name_of(source.path) or str(source.path.absolute())
        source.close()
        model.read_from = (source,)


def _entries_to_read(source: ModelSource, model) -> list[NamedParameter]:
    """Return this rank's parameters that a source has, and draw a classifier's new head; UserError
    if the weights are another model's. What is attached stays as it is."""
    entries = [entry for entry in model.entries() if not entry.spec.added]
    if getattr(model.config, "num_labels", 0) and not source.config.num_labels:
        new = next((entry for entry in entries if entry.name == CLASSIFIER_HEAD), None)
        if new:
            initialize(new.parameter, new.spec, model.ctx, derive_seed(model.seed, new.name))
            entries.remove(new)
    specs = source.specs
    other = [
        entry.name
        for entry in entries
        if entry.name in specs and specs[entry.name].shape != entry.spec.shape
    ]
    other += [entry.name for entry in entries if entry.name not in specs]
    if type(model) is not source.model or other:
        reason = f"its {other[0]} is another" if other else f"it is a {source.model.__name__}"
        raise UserError(f"{source.path} is not of this {type(model).__name__}: {reason}")
    return entries


def save_parallelized(
    model: Any,
    directory: str | Path | None = None,
    *,
    save_directory: str | Path | None = None,
    merge_checkpoints: bool = False,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a model from all ranks together, in place of what megazoo wrote there before.

    save_directory: OSLO's name for directory. The files: shards, one for each (tp, pp) rank; or
    with merge_checkpoints a Hugging Face directory, in files of max_shard_size at most (bytes, or
    as "5GB"). Raises UserError on every rank if one fails.
    """
    directory = Path(one_of("save_parallelized", directory, "save_directory", save_directory))
    ctx = model.ctx
    ctx.require_ranks()
    if model.attached:
        raise UserError(
            "the model has adapters beside its weights: megazoo.lora.save(model, DIR) writes them, "
            "and megazoo.lora.merge(model) makes one of both, which can be saved"
        )
    refuse_rounded(model, "saved")

    def begin() -> AbstractContextManager[Path]:
        if merge_checkpoints:
            hugging_face_config(model.config)  # raises before anything is written
            parse_size(max_shard_size)
        return output_directory(directory, lambda: _check_ours(directory))

    def complete(staging: Path, written: list[dict]) -> None:
        sidecars = model.sidecar_files
        write_manifest(staging, model.family, model.config, ctx, written, {}, sidecars, adapters={})
        if merge_checkpoints:
            write_model(SavedModel(staging, verify=False), staging, max_shard_size=max_shard_size)
            shards = (name for part in written for name in part["files"])
            for name in (MANIFEST, TRAINER, *shards):
                (staging / name).unlink()

    def files() -> Files:
        return files_of_rank(model, lambda entry: entry.parameter, None)

    write_together(directory, ctx, begin=begin, files=files, complete=complete)


def _check_ours(directory: Path) -> None:
    """Raise UserError if a directory would be replaced that megazoo didn't write."""
    if name := foreign_entry(directory):
        raise UserError(
            f"{directory} is not empty, and not of megazoo's writing: choose another; "
            f"it holds {name}"
        )
