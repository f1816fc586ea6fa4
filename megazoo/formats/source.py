"""A model on disk: named global tensors, and the config of the model."""

import math
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megazoo.checkpoint.format import spec_from_manifest
from megazoo.checkpoint.places import MANIFEST
from megazoo.checkpoint.reader import Checkpoint
from megazoo.checkpoint.shards import saved_entries
from megazoo.checkpoint.source import TensorSource
from megazoo.errors import UserError
from megazoo.families.registry import FAMILIES, Family, config_from_dict, family_named, family_of
from megazoo.optim.base import AVERAGE
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.parallel.shard import ParameterSpec, Piece
from megazoo.tokenizer import has_tokenizer


class ModelSource(TensorSource):
    """The tensors and the config of a model on disk.

    config: the config of the family. Opening checks that every tensor of the config exists with the
    right shape, in files that are large enough.
    """

    config: Any

    @property
    def is_of_run(self) -> bool:
        """Whether a run can resume from it."""
        return False

    @property
    def model(self) -> Family:
        """The family's class."""
        return FAMILIES[family_of(self.config)]

    @cached_property
    def specs(self) -> dict[str, ParameterSpec]:
        """The shape and shards of every weight, by its global name."""
        model = self.on_meta(ParallelContext())
        return {entry.name: entry.spec for entry in model.entries()}

    def on_meta(self, ctx: ParallelContext) -> Any:
        """Build a rank's shard of the model on the meta device."""
        return self.model.on_meta(self.config, ctx)

    @property
    def tokenizer(self) -> str | None:
        """The name of its tokenizer: its directory if the files are there, or "byte" if it was
        trained with bytes."""
        if has_tokenizer(self.path):
            return str(self.path)
        settings = self.trainer.get("settings")
        named = settings.get("tokenizer") if isinstance(settings, dict) else None
        return "byte" if named == "byte" else None  # a path is never taken from a checkpoint

    @property
    def pad_token_id(self) -> int | None:
        """The padding token in the config or generation_config.json, or None."""
        token = getattr(self.config, "pad_token_id", None)
        return self.generation.get("pad_token_id") if token is None else token

    def weight_bytes(self, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of the weights, in dtype or as stored."""
        return sum(
            math.prod(spec.shape) * (dtype or self.dtype_of(name)).itemsize
            for name, spec in self.specs.items()
        )

    def all_files(self, states: bool) -> set[str]:
        """Return the files of all weights, with `states` also those of the optimizer state. A
        format without checksums has none."""
        tensors = list(self.specs.items())
        if states:
            tensors += [
                (f"{name}.{state}", spec)
                for name, spec in tensors
                for state in self.states_of(name)
            ]
        return self.files_of(tensors, ParallelContext())

    def total_bytes(self, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of the weights, and of the optimizer state if there is one."""
        return self.weight_bytes(dtype) + sum(
            math.prod(spec.shape) * self.dtype_of(f"{name}.{state}").itemsize
            for name, spec in self.specs.items()
            for state in self.states_of(name)
        )


class SavedSource(ModelSource, Checkpoint):
    """A checkpoint of a registered family. UserError if its tensors don't match the config and the
    settings of the adapters."""

    def __init__(self, path: str | Path, *, verify: bool = True):
        super().__init__(path, verify=verify)
        self._check_kind()
        try:
            family_named(self.family)
        except UserError as error:
            file = self.trainer.get("import")
            known = isinstance(file, str) and len(file) < 4096
            used = f"; the run that saved {path} used --import {ascii(file)[1:-1]}" if known else ""
            raise UserError(f"{error}{used}") from None
        try:
            self.config = config_from_dict(self.family, self.values)
            self._check_config()
            specs = self.specs  # raises for sizes that are out of range
        except UserError as error:
            raise UserError(f"{self.path / MANIFEST}: {error}") from None
        for name, spec in specs.items():
            self.check_shape(name, spec)
        self._check_cuts()
        states = {f"{name}.{state}" for name in specs for state in self.states_of(name)}
        if unexpected := self.tensors.keys() - specs.keys() - states:
            raise UserError(
                f"{self.path / MANIFEST} lists the tensor {min(unexpected)}, which the model of "
                "its config does not have"
            )
        if self.total_bytes() > sum(self.file_sizes().values()):
            raise UserError(f"{self.path} has too few bytes for the tensors of its manifest")

    def _check_kind(self) -> None:
        """Raise UserError if this class does not read this kind of checkpoint."""
        raise NotImplementedError

    def _check_config(self) -> None:
        """Raise UserError for an invalid config, before the model is built on meta."""

    def _check_cuts(self) -> None:
        """Raise UserError if a weight is not sharded as in the model, for the layout of the run
        that wrote it: its rows would be read in the wrong order."""
        layout, folded = self.layout, self.layout.get("folded")
        dp, axes = layout["dp"] if folded else 1, tuple((folded or {}).items())
        writers = ParallelContext(Layout(tp=layout["tp"], dp=dp, folded=axes))
        for entry in saved_entries(self.on_meta(writers)):
            stored = spec_from_manifest(self.tensors[entry.name])
            if stored.shards != entry.spec.shards_in(writers):
                raise UserError(
                    f"{self.path / MANIFEST}: {entry.name} is not sharded as in the model"
                )


class HoldsAdapters(UserError):
    """A complete model is needed, but the checkpoint holds only adapters."""

    def __init__(self, path: Path, advice: str = ""):
        self.path = path
        advice = advice or (
            "pass its base as the model, and this checkpoint as --adapter "
            "(in Python: megazoo.lora.load)"
        )
        super().__init__(f"{path} holds only adapters: {advice}")


class SavedModel(SavedSource):
    """A checkpoint of a complete model. UserError if its tensors don't match the config."""

    @property
    def is_of_run(self) -> bool:
        return True

    def _check_kind(self) -> None:
        if self.attached:
            raise HoldsAdapters(self.path)

    def _check_config(self) -> None:
        layers, count = self.config.layers, len(self.tensors)
        if layers > count:
            raise UserError(f"it has {count} tensors for {layers} layers")


class AveragedModel(SavedModel):
    """A checkpoint of a complete model, with the moving averages of its weights in their place, and
    without optimizer state. UserError if its run stored none."""

    def __init__(self, path: str | Path, *, verify: bool = True):
        super().__init__(path, verify=verify)
        averages = {name: f"{name}.{AVERAGE}" for name in self.specs}
        self._averages = {name: each for name, each in averages.items() if each in self.tensors}
        if not self._averages:
            raise UserError(f"{self.path} has no moving average of the weights: omit --ema")

    def states_of(self, name: str) -> list[str]:
        return [] if hasattr(self, "_averages") else super().states_of(name)

    def most_precise(self, name: str) -> str:
        return name

    def read_pieces(
        self, name: str, destination: torch.Tensor, spec: ParameterSpec, pieces: list[Piece]
    ) -> None:
        super().read_pieces(self._averages.get(name, name), destination, spec, pieces)

    def files_of(
        self, tensors: Iterable[tuple[str, ParameterSpec]], ctx: ParallelContext
    ) -> set[str]:
        renamed = ((self._averages.get(name, name), spec) for name, spec in tensors)
        return super().files_of(renamed, ctx)
