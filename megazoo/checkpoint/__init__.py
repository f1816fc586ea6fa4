"""Checkpoints: named global tensors on disk, written and read by any layout."""

from megazoo.checkpoint.reader import Checkpoint
from megazoo.checkpoint.save import load, save

__all__ = ["Checkpoint", "load", "save"]
