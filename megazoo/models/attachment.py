"""The interface of additional parameters, such as adapters, that can be attached to a model."""

from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

if TYPE_CHECKING:
    from megazoo.checkpoint.reader import Checkpoint


class Attachment(Protocol):
    """What is attached to a model, such as megazoo.lora.LoRASettings."""

    def check_for(self, whole: nn.Module) -> None:
        """Raise UserError if it can't be attached. whole: the model with all its layers, for
        example on the meta device."""

    def attach(self, model: nn.Module) -> None:
        """Add its modules to this rank's stages of a model, and set `model.attached`.

        The specs of the new parameters have `added` set. All other parameters are frozen, except a
        classifier's head.
        """

    def entries_for_manifest(self, model: Any) -> dict:
        """Return the entries `adapters` and `base`, objects of JSON types, of the manifest of the
        model's checkpoints. Every rank of a replica calls it."""

    def check_same(self, checkpoint: "Checkpoint", model: Any) -> None:
        """Raise UserError unless a checkpoint has the same attachment, trained parameters and base
        weights as the model. Every rank of a replica calls it before it loads the checkpoint."""
