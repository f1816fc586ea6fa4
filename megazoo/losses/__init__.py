"""Losses of language models: one file for each. A file of --import registers further ones."""

from megazoo.losses.base import LOSSES, Loss, register_loss
from megazoo.losses.preferences import DPO

__all__ = ["DPO", "LOSSES", "Loss", "register_loss"]
