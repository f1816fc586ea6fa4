"""Checkpoints: named global tensors on disk, which any parallel layout can write and read."""

from typing import TYPE_CHECKING

from megazoo.lazy import lazy_attributes

if TYPE_CHECKING:
    from megazoo.checkpoint.loading import load
    from megazoo.checkpoint.reader import Checkpoint
    from megazoo.checkpoint.saving import Saver, save

# Names that need torch are imported at first use, so that a tokenizer can be found without torch.
__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "Checkpoint": "megazoo.checkpoint.reader",
        "Saver": "megazoo.checkpoint.saving",
        "load": "megazoo.checkpoint.loading",
        "save": "megazoo.checkpoint.saving",
    },
)

__all__ = ["Checkpoint", "Saver", "load", "save"]
