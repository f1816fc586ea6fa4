"""Optimizers, gradient clipping, learning rates and the loss scale of float16."""

from megazoo.optim.adamw import AdamW
from megazoo.optim.clip import clip_grad_norm
from megazoo.optim.learning_rate import learning_rate
from megazoo.optim.loss_scale import LossScale
from megazoo.optim.muon import Muon

__all__ = ["AdamW", "LossScale", "Muon", "clip_grad_norm", "learning_rate"]
