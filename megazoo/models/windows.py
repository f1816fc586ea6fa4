"""The parts of families in which layers with a window rotate queries and keys with another base.

Only layers without a window have the scaling of the rotary embeddings for longer contexts.
"""

from typing import Any

import torch

from megazoo.engine.microbatch import MicroBatch, static_steps
from megazoo.layers import Rotary
from megazoo.models import llama


class WindowBlock(llama.Block):
    """A layer that gets cos and sin for layers without a window and for layers with one.

    `attention_settings` sets has_window.
    """

    kernel_masks = True
    has_window: bool

    def forward(
        self,
        x: torch.Tensor,
        batch: MicroBatch,
        rotary: Any,  # of layers without a window, and of layers with one
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        return super().forward(x, batch, rotary[self.has_window], mask)


class WindowLlama(llama.Llama):
    """A Llama with rotary embeddings of the base window_theta for the layers with a window."""

    def add_shared(self) -> None:
        super().add_shared()
        size = self.config.head_size or self.config.hidden_size // self.config.heads
        self.window_rotary = Rotary(size, self.config.window_theta, self.config.max_positions)

    @static_steps
    def layer_inputs(self, x: torch.Tensor, batch: MicroBatch) -> tuple:
        rotary, mask = super().layer_inputs(x, batch)
        in_window = self.window_rotary(batch.positions(x.device), x.dtype)
        return (rotary, in_window), mask
