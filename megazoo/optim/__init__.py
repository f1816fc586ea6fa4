"""Optimizers, gradient clipping, learning-rate schedules and the loss scale of float16."""

from typing import TYPE_CHECKING

from megazoo.lazy import lazy_attributes

if TYPE_CHECKING:
    from megazoo.optim.adamw import AdamW
    from megazoo.optim.clip import clip_grad_norm
    from megazoo.optim.learning_rate import LRSchedule, lr_schedule, register_lr_schedule
    from megazoo.optim.loss_scale import LossScale
    from megazoo.optim.muon import Muon

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "AdamW": "megazoo.optim.adamw",
        "LRSchedule": "megazoo.optim.learning_rate",
        "LossScale": "megazoo.optim.loss_scale",
        "Muon": "megazoo.optim.muon",
        "clip_grad_norm": "megazoo.optim.clip",
        "lr_schedule": "megazoo.optim.learning_rate",
        "register_lr_schedule": "megazoo.optim.learning_rate",
    },
)

__all__ = [
    "AdamW",
    "LRSchedule",
    "LossScale",
    "Muon",
    "clip_grad_norm",
    "lr_schedule",
    "register_lr_schedule",
]
