"""Adapters on disk: those of checkpoints, and what opens them, whatever wrote them."""

from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megazoo.checkpoint.places import has_checkpoint, named_directory
from megazoo.checkpoint.shards import saved_entries
from megazoo.errors import UserError
from megazoo.lora.matrices import AdapterSource, Matrix, adaptable_matrices, adapted
from megazoo.lora.peft import ADAPTER_CONFIG, PEFTDirectory, labels_in
from megazoo.lora.settings import LoRASettings
from megazoo.models.base import Model
from megazoo.models.pretrained import open_source, with_labels
from megazoo.models.source import HoldsAdapters, ModelSource, SavedSource
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import ParameterSpec

# Fields of a config in which a model and its base may differ: a classifier is made of a language
# model.
OF_A_CLASSIFIER = ("num_labels", "pad_token_id", "problem_type")


class SavedAdapters(SavedSource, AdapterSource):
    """A checkpoint of a model with adapters: these alone, and what else was trained. UserError if
    its tensors are not what its config and its settings say, or if it holds a whole model.

    settings: what the adapters are. base_path: the directory that the base was read from, if it was
    not drawn from the seed. `specs` has what is held by its global names, the score.weight of a
    classifier, too. megazoo/checkpoint/base.py compares the base.
    """

    @property
    def base_path(self) -> Path | None:
        path = self.manifest["base"]["path"]
        return path and Path(path)

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
        if not self.about_adapters:
            raise UserError(f"{self.path} has no adapters: it holds a whole model")

    def _check_config(self) -> None:
        stored = self.manifest["adapters"]
        unknown = stored.keys() - {f.name for f in fields(LoRASettings)}
        if unknown:
            raise UserError(f"adapters has the unknown {min(unknown)}: upgrade megazoo")
        values: dict[str, Any] = {**stored, "targets": tuple(stored["targets"])}
        self.settings = LoRASettings(**values)
        self.settings.check_for(self.model.on_meta(self.config, ParallelContext()))


def open_model_or_adapters(path: str | Path, *, verify: bool = True) -> ModelSource:
    """Open what `open_source` does, or a checkpoint that holds adapters alone."""
    try:
        return open_source(path, verify=verify)
    except HoldsAdapters as error:
        return SavedAdapters(error.path, verify=verify)


def open_beside(
    path: str | Path, base: ModelSource, *, verify: bool = True
) -> tuple[AdapterSource, object]:
    """Open adapters for a model on disk; returns them, and the model's config: of a classifier, if
    its head is among them. Arguments and errors as in `open_adapter`."""
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
    """Open the adapters of a directory for a model; nothing is read yet but what they are.

    path: PEFT's directory, or one of `megazoo.lora.save`; or a checkpoint of a run with adapters.
    whole: the model, all of its layers; on the meta device will do. verify: whether a checkpoint's
    files are compared with its checksums. UserError if there are no adapters, none of this model,
    or of a kind that is not supported.
    """
    path = named_directory(path)
    if not _is_checkpoint(path):
        return PEFTDirectory(path, whole)
    source = SavedAdapters(path, verify=verify)
    if source.model is not type(whole):
        raise UserError(
            f"{path} has adapters of a {source.model.__name__}, not of a {type(whole).__name__}"
        )
    _check_config(whole.config, "the model", source)
    return source


def check_configs(base: ModelSource, adapters: SavedAdapters) -> None:
    """Refuse a base that is another model: the weights alone don't tell what is computed of
    them."""
    if base.model is not adapters.model:
        raise UserError(
            f"{base.path} is a {base.model.__name__}, but {adapters.path} has adapters of a "
            f"{adapters.model.__name__}"
        )
    _check_config(base.config, str(base.path), adapters)


def _check_config(config, origin: str, adapters: SavedAdapters) -> None:
    """Refuse a config of the same family with another value. origin: where it is from."""
    for f in fields(adapters.config):
        ours, theirs = getattr(config, f.name), getattr(adapters.config, f.name)
        if ours != theirs and not f.name.endswith("dropout") and f.name not in OF_A_CLASSIFIER:
            raise UserError(
                f"{f.name} is {ours} in {origin}, but {theirs} in {adapters.path}, "
                "whose base it is to be"
            )


def _is_checkpoint(path: Path) -> bool:
    """Say whether a directory holds a checkpoint, and no adapters of PEFT's."""
    return has_checkpoint(path) and not (path / ADAPTER_CONFIG).is_file()
