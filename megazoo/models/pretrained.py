"""Functions that load models from checkpoints and Hugging Face directories, and save them."""

from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megazoo.checkpoint.directories import output_directory
from megazoo.checkpoint.foreign import what_is
from megazoo.checkpoint.ownership import ADAPTER_CONFIG, foreign_entry
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
from megazoo.engine.habits import translated
from megazoo.errors import UserError, any_of
from megazoo.families.config import fields_of_training
from megazoo.families.published import published
from megazoo.families.registry import family_of, presets
from megazoo.formats.dcp.metadata import is_distributed
from megazoo.formats.dcp.source import DistributedCheckpoint, home_of
from megazoo.formats.gguf.source import GGUFModel
from megazoo.formats.hugging_face.directory import HuggingFaceDirectory
from megazoo.formats.hugging_face.export import hugging_face_config, parse_size, write_model
from megazoo.formats.megatron.source import MegatronCheckpoint, is_megatron
from megazoo.formats.source import HoldsAdapters, ModelSource, SavedModel
from megazoo.gguf_file import is_gguf
from megazoo.hub import name_of
from megazoo.layers.linear import refuse_rounded
from megazoo.models.outputs import CLASSIFIER_HEAD
from megazoo.models.registry import GIVE_A_DIRECTORY
from megazoo.parallel.context import ParallelContext, current_context
from megazoo.parallel.dtypes import dtype_named
from megazoo.parallel.failure import propagate_errors
from megazoo.parallel.module import NamedParameter, initialize
from megazoo.parallel.random import derive_seed
from megazoo.parallel.storage import in_memory
from megazoo.terminal import byte_bar

if TYPE_CHECKING:
    from megazoo.models.base import Model


def open_source(path: str | Path, *, verify: bool = True) -> ModelSource:
    """Open a megazoo checkpoint, a Hugging Face directory (one with a config.json), a checkpoint of
    torch.distributed.checkpoint, a Megatron-LM checkpoint, or a GGUF file.

    Args:
        path: a path, or org/name[@revision] on the Hugging Face hub.
        verify: compare the files with the checksums of a megazoo checkpoint. The other formats have
            no checksums.

    Raises:
        UserError: if the path is in another format, or does not exist.
        HoldsAdapters: for a megazoo checkpoint that holds only adapters.
    """
    path = named_directory(path)
    if is_gguf(path):
        return GGUFModel(path)
    if not (path / MANIFEST).is_file():
        if is_distributed(path) and home_of(path):
            return DistributedCheckpoint(path)
        if is_megatron(path):
            return MegatronCheckpoint(path)
        if (path / CONFIG).is_file():
            return HuggingFaceDirectory(path)
    try:
        step = find_checkpoint(path)
    except NoCheckpoint as error:
        if (path / ADAPTER_CONFIG).is_file():
            raise UserError(
                f"{path} holds only a PEFT adapter: pass its base as the model, and this directory "
                "as --adapter, or --lora-load for training (in Python: megazoo.lora.load)"
            ) from None
        if found := what_is(path):
            raise UserError(f"{path} {found}") from None
        known = published(str(path)).hub
        hint = f"; on the Hugging Face hub it is {known}" if known else ""
        raise UserError(
            f"{error}, nor {CONFIG}" if path.is_dir() else f"{path} is not a directory{hint}"
        ) from None
    return DistributedCheckpoint(step) if is_distributed(step) else SavedModel(step, verify=verify)


def from_pretrained(
    path: str | Path,
    ctx: ParallelContext | None = None,
    *,
    dtype: torch.dtype | str | None = "auto",
    seed: int = 0,
    num_labels: int | None = None,
    pad_token_id: int | None = None,
    verify: bool = True,
    **fields: Any,
) -> "Model":
    """Load this rank's shard of a model. Every rank of the context calls it.

    Each rank reads only its shard, directly into its parameters.

    Args:
        path: a megazoo checkpoint of any parallel layout, a Hugging Face directory, a checkpoint of
            torch.distributed.checkpoint with the model's config.json, a Megatron-LM checkpoint, a
            GGUF file, or org/name[@revision] on the Hugging Face hub, which is downloaded into the
            hub's cache.
        ctx: parallel context; by default the ambient one.
        dtype: data type of the weights: a torch.dtype or its name, such as "bfloat16" or "bf16".
            "auto" (the default) is the stored data type.
        seed: seed of dropout, and of a new classifier head.
        num_labels: load the model as a sequence classifier with this many labels. A language-model
            head is replaced by a new one, drawn from the seed.
        pad_token_id: padding token of that classifier, if the files do not have one.
        verify: compare the files with the checksums of a megazoo checkpoint while they are read.
        fields: fields of the config that affect only training, such as router_balance="batch", and
            the values that replace those of the files. Arguments of transformers are also accepted
            if they change nothing here, such as trust_remote_code; torch_dtype is dtype, and
            revision a revision of the hub.

    Returns:
        The model, an nn.Module on ctx.device, in evaluation mode. `train_batch` or `model.train()`
        switches to training mode.

    Raises:
        UserError: if the model can't be read, or can't be sharded in this layout.

    Example:
        ctx = megazoo.ParallelContext.from_torch(tensor_parallel_size=2)
        model = megazoo.from_pretrained("EleutherAI/pythia-160m", ctx, dtype="bf16")
    """
    ctx = ctx or current_context()
    with propagate_errors(ctx):
        path, dtype = translated(path, dtype, ctx.device, fields)
        given = dtype_named(dtype)
        source = open_directory(path, verify=verify)
        config = _with_fields(with_labels(source, num_labels, pad_token_id), fields)
        dtype = given or source.dtype_of(next(iter(source.specs)))
        model = source.model.empty(config, ctx, dtype=dtype, seed=seed)
        load_weights(source, model)
    return model.eval()


def _with_fields(config: Any, values: dict[str, Any]) -> Any:
    """Return a config with other values of fields; UserError for a field that does not affect only
    training."""
    known = fields_of_training(config)
    if unknown := values.keys() - known:
        raise UserError(
            f"{min(unknown)} can't be changed when {family_of(config)} is loaded: "
            + (f"use {any_of(known)}" if known else "remove it")
        )
    found = getattr(config, "router_balance", None)
    wanted = values.get("router_balance", found)
    if found != wanted and "bias" in (found, wanted):
        raise UserError(
            f"router_balance {wanted!r} can't replace {found!r} of the files: only a model with "
            "balance 'bias' has the bias"
        )
    return replace(config, **values)


def with_labels(
    source: ModelSource, num_labels: int | None, pad_token_id: int | None = None
) -> Any:
    """Return the config of a source, with num_labels and pad_token_id if they are given.

    They have the meaning of `from_pretrained`. UserError if the source is a classifier with another
    number of labels, or its family has no classifier.
    """
    config = source.config
    if num_labels is None or num_labels == config.num_labels:
        return config
    if config.num_labels:
        raise UserError(
            f"{source.path} is a classifier with {config.num_labels} labels, not {num_labels}"
        )
    if missing := {"num_labels", "pad_token_id"} - {f.name for f in fields(config)}:
        raise UserError(
            f"{type(config).__name__} has no {min(missing)}: its family has no classifier"
        )
    pad = source.pad_token_id if pad_token_id is None else pad_token_id
    return replace(config, num_labels=num_labels, pad_token_id=pad)


def from_parallelized(
    path: str | Path | None = None,
    ctx: ParallelContext | None = None,
    *,
    load_directory: str | Path | None = None,
    **options: Any,
) -> "Model":
    """Load this rank's shard of a model: `from_pretrained` under its name in OSLO.

    Args:
        path: a megazoo checkpoint of any parallel layout, or another path that `from_pretrained`
            accepts.
        ctx: parallel context; by default the ambient one.
        load_directory: the name of `path` in OSLO. Pass one of the two.
        options: the other arguments of `from_pretrained`.

    Returns:
        The model, in evaluation mode.

    Raises:
        UserError: as in `from_pretrained`, and if the directory is passed twice or not at all.
    """
    directory = one_of("from_parallelized", path, "load_directory", load_directory)
    return from_pretrained(directory, ctx, **options)


def open_directory(path: str | Path, *, verify: bool = True) -> ModelSource:
    """Open the directory that a user passed for its weights: see `open_source`. UserError if it
    does not exist, with what to do."""
    if isinstance(path, torch.nn.Module):
        raise UserError(GIVE_A_DIRECTORY)
    if not isinstance(path, str | Path):
        raise UserError(
            f"weights are read from a directory, not from {type(path).__name__}: "
            "for random weights, call megazoo.from_config"
        )
    if not named_directory(path).exists():
        is_preset = str(path) in presets()
        random = f"; for random weights call megazoo.from_config({str(path)!r}, ctx)"
        raise UserError(
            f"{path} is not a directory: {Path(path).absolute()} does not exist; "
            "pass a checkpoint, or a directory that transformers' save_pretrained wrote"
            f"{random if is_preset else ''}"
        )
    try:
        return open_source(path, verify=verify)
    except HoldsAdapters as error:
        advice = f"load its base, then call megazoo.lora.load(model, {str(path)!r})"
        raise HoldsAdapters(error.path, advice) from None


def one_of(function: str, directory: Any, name: str, named: Any) -> Any:
    """Return the directory that was passed to a function, by position or by its name in OSLO;
    UserError for both or neither."""
    if (directory is None) == (named is None):
        problem = "gets its directory twice" if named is not None else "needs a directory"
        raise UserError(
            f"{function} {problem}: call {function}(DIRECTORY) or {function}({name}=DIRECTORY)"
        )
    return named if directory is None else directory


def load_weights(source: ModelSource, model: Any) -> None:
    """Fill this rank's parameters from an open source, and keep its sidecar files in the model.

    A classifier also accepts the weights of a language model; its head is then drawn from the
    model's seed. Every rank calls it. UserError if the weights belong to another model, or a file
    is corrupt.
    """
    with propagate_errors(model.ctx):
        refuse_rounded(model, "loaded")
        entries = _entries_to_read(source, model)
        files = source.files_of([(entry.name, entry.spec) for entry in entries], model.ctx)
        size = sum(entry.parameter.nbytes for entry in entries)
        with verifying(source, files, model.ctx), byte_bar(size, "load") as bar:
            for entry in in_memory(model, entries, write=True):
                source.read_into(entry.name, entry.parameter, entry.spec, model.ctx)
                bar.update(entry.parameter.nbytes)
            model.sidecar_files = source.sidecar_files if model.ctx.rank == 0 else {}
            model.generation = source.generation
            model.weights_path = name_of(source.path) or str(source.path.absolute())
        source.close()
        model.engine.weights_read(source)


def _entries_to_read(source: ModelSource, model) -> list[NamedParameter]:
    """Return this rank's parameters that a source has, and draw a classifier's new head.

    Attached parameters stay as they are. UserError if the weights belong to another model.
    """
    entries = [entry for entry in model.entries() if not entry.spec.added]
    if getattr(model.config, "num_labels", 0) and not source.config.num_labels:
        new = next((entry for entry in entries if entry.name == CLASSIFIER_HEAD), None)
        if new:
            for each in in_memory(model, [new], write=True):
                initialize(each.parameter, each.spec, model.ctx, derive_seed(model.seed, each.name))
            entries.remove(new)
    specs = source.specs
    other = [
        entry.name
        for entry in entries
        if entry.name in specs and specs[entry.name].shape != entry.spec.shape
    ]
    other += [entry.name for entry in entries if entry.name not in specs]
    if type(model) is not source.model or other:
        reason = (
            f"{other[0]} is missing, or has another shape"
            if other
            else f"it holds a {source.model.__name__}"
        )
        raise UserError(
            f"{source.path} does not hold the weights of this {type(model).__name__}: {reason}"
        )
    return entries


def save_parallelized(
    model: Any,
    directory: str | Path | None = None,
    *,
    save_directory: str | Path | None = None,
    merge_checkpoints: bool = False,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a checkpoint or a Hugging Face directory, from all ranks together.

    The arguments, files and errors are those of `Model.save_parallelized`.
    """
    directory = Path(one_of("save_parallelized", directory, "save_directory", save_directory))
    ctx = model.ctx
    ctx.require_ranks()
    if model.attached:
        raise UserError(
            "the model has adapters, which can't be saved this way: save them with "
            "megazoo.lora.save(model, DIRECTORY), or add them to the weights with "
            "megazoo.lora.merge(model) before saving"
        )
    refuse_rounded(model, "saved")

    def begin() -> AbstractContextManager[Path]:
        if merge_checkpoints:
            hugging_face_config(model.config)  # raises before anything is written
            parse_size(max_shard_size)
        return output_directory(directory, lambda: _check_ours(directory))

    def complete(staging: Path, written: list[dict]) -> None:
        sidecars = model.sidecar_files
        write_manifest(staging, model.family, model.config, ctx, written, {}, sidecars, attached={})
        if merge_checkpoints:
            write_model(SavedModel(staging, verify=False), staging, max_shard_size=max_shard_size)
            shards = (name for part in written for name in part["files"])
            for name in (MANIFEST, TRAINER, *shards):
                (staging / name).unlink()

    def files() -> Files:
        return files_of_rank(model, None)

    write_together(directory, ctx, begin=begin, files=files, complete=complete)


def _check_ours(directory: Path) -> None:
    """Raise UserError if a directory holds files that megazoo did not write."""
    if name := foreign_entry(directory):
        raise UserError(
            f"{directory} holds {name}, which megazoo did not write: choose another directory"
        )
