"""Checkpoints: named global tensors on disk, written and read by any layout."""

from typing import TYPE_CHECKING

from megazoo.lazy import lazy_attributes

if TYPE_CHECKING:
    from megazoo.checkpoint.loading import load
    from megazoo.checkpoint.reader import Checkpoint
    from megazoo.checkpoint.saving import Saver, save

# What needs torch is imported when it is first used: a tokenizer is found without it.
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
