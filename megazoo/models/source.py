"""A model on disk: named global tensors, and the config that says what they are."""

from functools import cached_property
from pathlib import Path

from megazoo.checkpoint.reader import Checkpoint
from megazoo.checkpoint.source import Source
from megazoo.errors import UserError
from megazoo.models.registry import FAMILIES, config_from_dict, family_of
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import ParameterSpec


class ModelSource(Source):
    """Tensors on disk of which a config says what they are.

    config: the family's. What is opened is consistent: every tensor is there in the shape that the
    config says, in files that are large enough for it.
    """

    config: object

    @property
    def model(self) -> type:
        """The family's class."""
        return FAMILIES[family_of(self.config)]

    @cached_property
    def specs(self) -> dict[str, ParameterSpec]:
        """The shape and cut of every weight, by its global name."""
        return {
            entry.name: entry.spec
            for entry in self.model.on_meta(self.config, ParallelContext()).entries()
        }

    @property
    def pad_token_id(self) -> int | None:
        """What pads a row, if anything says so."""
        ours = getattr(self.config, "pad_token_id", None)
        return self.generation.get("pad_token_id") if ours is None else ours


class SavedModel(ModelSource, Checkpoint):
    """A checkpoint whose config is one of a known family. UserError if its tensors are not what the
    config says."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.config = config_from_dict(self.family, self.values)
        if self.config.layers > len(self.tensors):
            raise UserError(
                f"{self.path} has {len(self.tensors)} tensors for {self.config.layers} layers"
            )
        self.check_tensors()
