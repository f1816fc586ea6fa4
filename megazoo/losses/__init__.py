"""Losses of language models: one file for each. A file of --import registers further ones."""

from typing import TYPE_CHECKING

from megazoo.lazy import lazy_attributes

if TYPE_CHECKING:
    from megazoo.losses.base import Loss, register_loss
    from megazoo.losses.distillation import Distillation, TopKDistillation
    from megazoo.losses.preferences import DPO
    from megazoo.losses.reference import reference_logprobs, teacher_activations

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "DPO": "megazoo.losses.preferences",
        "Distillation": "megazoo.losses.distillation",
        "Loss": "megazoo.losses.base",
        "TopKDistillation": "megazoo.losses.distillation",
        "reference_logprobs": "megazoo.losses.reference",
        "register_loss": "megazoo.losses.base",
        "teacher_activations": "megazoo.losses.reference",
    },
)

__all__ = [
    "DPO",
    "Distillation",
    "Loss",
    "TopKDistillation",
    "reference_logprobs",
    "register_loss",
    "teacher_activations",
]
