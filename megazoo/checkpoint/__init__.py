"""Checkpoints: named global tensors on disk, written and read by any layout, or as Hugging Face has them."""

from megazoo.checkpoint.convert import open_source
from megazoo.checkpoint.hugging_face import HuggingFaceDirectory
from megazoo.checkpoint.pretrained import from_parallelized, from_pretrained, load_weights, save_parallelized
from megazoo.checkpoint.reader import Checkpoint
from megazoo.checkpoint.save import Saver, load, save

__all__ = [
    "Checkpoint",
    "HuggingFaceDirectory",
    "Saver",
    "from_parallelized",
    "from_pretrained",
    "load",
    "load_weights",
    "open_source",
    "save",
    "save_parallelized",
]
