"""Checkpoints: named global tensors on disk, written and read by any layout."""

from megazoo.lazy import lazily

# What needs torch is imported when it is first used: a tokenizer is found without it.
__getattr__ = lazily(
    __name__,
    {
        "Checkpoint": "megazoo.checkpoint.reader",
        "Saver": "megazoo.checkpoint.saving",
        "load": "megazoo.checkpoint.loading",
        "save": "megazoo.checkpoint.saving",
    },
)

__all__ = ["Checkpoint", "Saver", "load", "save"]
