"""Adapters on disk: reads those of checkpoints, and opens adapters in any supported format."""

from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megazoo.checkpoint.format import ADAPTERS
from megazoo.checkpoint.places import has_checkpoint, named_directory
from megazoo.checkpoint.shards import saved_entries
from megazoo.errors import UserError
from megazoo.formats.source import HoldsAdapters, ModelSource, SavedSource
from megazoo.lora.manifest import stored_in
from megazoo.lora.matrices import AdapterSource, Matrix, adaptable_matrices, adapted
from megazoo.lora.peft import ADAPTER_CONFIG, PEFTDirectory, labels_in
from megazoo.lora.settings import LoRASettings
from megazoo.models.base import Model
from megazoo.models.pretrained import open_source, with_labels
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import ParameterSpec

# Fields in which the configs of a model and its base may differ: the base of a classifier may be a
# language model.
OF_A_CLASSIFIER = ("num_labels", "pad_token_id", "problem_type")


class SavedAdapters(SavedSource, AdapterSource):
    """A checkpoint of a model with adapters. It holds only these and the other trained parameters.

    settings: those of the adapters. base: their base. base_path: the directory of the base model;
    None if the base was drawn from the seed. specs: all tensors by their global names, also
    score.weight of a classifier. megazoo/lora/manifest.py compares the base. UserError if the
    tensors don't match the config and the settings, or if the checkpoint holds a complete model.
    """

    @property
    def base_path(self) -> Path | None:
        return Path(self.base.path) if self.base.path else None

    @cached_property
    def matrices(self) -> list[Matrix]:
        return adapted(adaptable_matrices(super().on_meta(ParallelContext())), self.settings)

    @cached_property
    def specs(self) -> dict[str, ParameterSpec]:
        entries = saved_entries(self.on_meta(ParallelContext()))
        return {entry.name: entry.spec for entry in entries}

    def on_meta(self, ctx: ParallelContext) -> Model:
        model = super().on_meta(ctx)
        self.settings.attach(model)
        for entry in model.entries():
            entry.parameter.requires_grad_(entry.name in self.tensors)
        return model

    def _check_kind(self) -> None:
        if not self.attached:
            raise UserError(f"{self.path} has no adapters: it holds a complete model")
        stored, self.base = stored_in(self)
        values: dict[str, Any] = self.attached[ADAPTERS] | {"targets": tuple(stored.targets)}
        self.settings = LoRASettings(**values)

    def _check_config(self) -> None:
        self.settings.check_for(self.model.on_meta(self.config, ParallelContext()))


def open_model_or_adapters(path: str | Path, *, verify: bool = True) -> ModelSource:
    """Open a model as `open_source` does, or a checkpoint that holds only adapters."""
    try:
        return open_source(path, verify=verify)
    except HoldsAdapters as error:
        return SavedAdapters(error.path, verify=verify)


def open_beside(
    path: str | Path, base: ModelSource, *, verify: bool = True
) -> tuple[AdapterSource, object]:
    """Open adapters for a model on disk; return them and the model's config.

    The config is that of a classifier if the adapters include its head. The arguments and errors
    are those of `open_adapter`.
    """
    path = named_directory(path)
    if _is_checkpoint(path):
        adapters = SavedAdapters(path, verify=verify)
        check_configs(base, adapters)
        theirs = adapters.config
        config = with_labels(base, theirs.num_labels or None, theirs.pad_token_id)
        if theirs.num_labels:
            config = replace(config, problem_type=theirs.problem_type)
    else:
        config = with_labels(base, labels_in(path) or None)
    whole = base.model.on_meta(config, ParallelContext())
    return open_adapter(path, whole, verify=verify), config


def open_adapter(path: str | Path, whole: Any, *, verify: bool = True) -> AdapterSource:
    """Open the adapters of a directory for a model. Only their settings are read now.

    Args:
        path: a directory that PEFT or `megazoo.lora.save` wrote, or a checkpoint of a run with
            adapters.
        whole: the model with all its layers, for example on the meta device.
        verify: compare the files with the checksums of a checkpoint.

    Raises:
        UserError: if there are no adapters, if they belong to another model, or are not supported.
    """
    path = named_directory(path)
    if not _is_checkpoint(path):
        return PEFTDirectory(path, whole)
    source = SavedAdapters(path, verify=verify)
    if source.model is not type(whole):
        raise UserError(
            f"{path} has adapters for a {source.model.__name__}, not for a {type(whole).__name__}"
        )
    _check_config(whole.config, "the model", source)
    return source


def check_configs(base: ModelSource, adapters: SavedAdapters) -> None:
    """Raise UserError if a base has another family or config than the adapters. (The checksum of
    the weights does not cover the config.)"""
    if base.model is not adapters.model:
        raise UserError(
            f"{base.path} is a {base.model.__name__}, but {adapters.path} has adapters for a "
            f"{adapters.model.__name__}"
        )
    _check_config(base.config, str(base.path), adapters)


def _check_config(config, origin: str, adapters: SavedAdapters) -> None:
    """Raise UserError if a config of the same family has another value. origin: the name of its
    source in the error."""
    for f in fields(adapters.config):
        base, stored = getattr(config, f.name), getattr(adapters.config, f.name)
        if base != stored and not f.name.endswith("dropout") and f.name not in OF_A_CLASSIFIER:
            raise UserError(
                f"{f.name} is {base} in {origin}, but {stored} in {adapters.path}: they must be "
                "equal in a base and its adapters"
            )


def _is_checkpoint(path: Path) -> bool:
    """Return whether a directory holds a checkpoint, and no adapters in the format of PEFT."""
    return has_checkpoint(path) and not (path / ADAPTER_CONFIG).is_file()
