"""The interface of additional parameters, such as adapters, that can be attached to a model."""

from typing import Protocol

from torch import nn


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
