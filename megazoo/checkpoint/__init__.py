"""Checkpoints: named global tensors on disk, written and read by any layout."""

from megazoo.lazy import lazy_attributes

# What needs torch is imported when it is first used: a tokenizer is found without it.
__getattr__ = lazy_attributes(
    __name__,
    {
        "Checkpoint": "megazoo.checkpoint.reader",
        "Saver": "megazoo.checkpoint.saving",
        "load": "megazoo.checkpoint.loading",
        "save": "megazoo.checkpoint.saving",
        # Of models: where users found them in the first version. Nothing in here uses them.
        "HuggingFaceDirectory": "megazoo.models.hugging_face.directory",
        "from_parallelized": "megazoo.models",
        "from_pretrained": "megazoo.models",
        "load_weights": "megazoo.models.pretrained",
        "open_source": "megazoo.models.pretrained",
        "save_parallelized": "megazoo.models.pretrained",
    },
)

__all__ = ["Checkpoint", "Saver", "load", "save"]
