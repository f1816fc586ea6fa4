"""What can be attached to a model beside its own weights, as far as models ask of it."""

from typing import Protocol

from torch import nn


class Attachment(Protocol):
    """A dataclass of plain values, which a checkpoint keeps, such as megazoo.lora.LoRASettings."""

    def check_for(self, whole: nn.Module) -> None:
        """Raise UserError if it can't be attached. whole: the model, all of its layers; on the meta
        device will do."""

    def attach(self, model: nn.Module) -> None:
        """Give this rank's stages of a model their modules, of whose parameters the specs say
        `added`, and freeze all else but a classifier's head. `model.attached` is this, then."""
