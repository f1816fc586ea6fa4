"""The interface of additional parameters, such as adapters, that can be attached to a model."""

from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from megazoo.checkpoint.source import TensorSource

if TYPE_CHECKING:
    from megazoo.checkpoint.reader import Checkpoint

# The entries of a manifest on what is attached: see megazoo/lora/manifest.py.
ADAPTERS, BASE = "adapters", "base"


class Attachment(Protocol):
    """A dataclass of plain values that a checkpoint stores, such as megazoo.lora.LoRASettings."""

    def check_for(self, whole: nn.Module) -> None:
        """Raise UserError if it can't be attached. whole: the model with all its layers, for
        example on the meta device."""

    def attach(self, model: nn.Module) -> None:
        """Add its modules to this rank's stages of a model, and set `model.attached`.

        The specs of the new parameters have `added` set. All other parameters are frozen, except a
        classifier's head.
        """

    def entries_for_manifest(self, model: Any) -> dict:
        """Return the entries, of JSON types, that a checkpoint of the model stores in its manifest
        with the trained parameters. Every rank of a replica calls it."""

    def check_same(self, checkpoint: "Checkpoint", model: Any) -> None:
        """Raise UserError unless a checkpoint has the same attachment, trained parameters and base
        weights as the model. Every rank of a replica calls it before it loads the checkpoint."""


def holds_adapters(source: TensorSource) -> bool:
    """Return whether an open source is a checkpoint that holds only adapters and the parameters
    that were trained with them."""
    return not source.extra.keys().isdisjoint((ADAPTERS, BASE))
