"""Checkpoints: named global tensors on disk, written and read by any layout."""

from megazoo.checkpoint.reader import Checkpoint
from megazoo.checkpoint.save import Saver, load, save

__all__ = ["Checkpoint", "Saver", "load", "save"]
