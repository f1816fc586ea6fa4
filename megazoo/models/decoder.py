"""The base class of decoders: an embedding, layers that pass one tensor on, a norm, and a head."""

from functools import partial
from typing import Any

import torch
from torch import nn

from megazoo.engine.microbatch import MicroBatch, static_steps
from megazoo.models.base import Model
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.stages import Stage


class Decoder(Model):
    """A model in which each stage runs its part of these lines:

        x = embed(ids)                                  first stage
        x = layer(x, batch, *layer_inputs(x, batch))    each layer
        x = finish(x)                                   last stage, before the head

    A family defines what is particular about it: `make_norm`, and where it needs them `add_first`
    and `embed`, `add_shared` and `layer_inputs`, `finish`, and arguments of `add_head`.

    Args:
        config: the family's config.
        ctx: parallel context.
        seed: seed of dropout, as in Model.
    """

    def __init__(self, config: Any, ctx: ParallelContext, seed: int = 0):
        super().__init__(config, ctx, seed)
        self.add_embedding()
        if self.has_first:
            self.add_first()
        self.add_layers()
        self.add_shared()
        if self.has_last:
            self.norm = self.make_norm()
        self.add_head()

    def add_first(self) -> None:
        """Add what the first stage has in addition to the embedding, such as learned positions."""

    def add_shared(self) -> None:
        """Add what all layers of this rank share, such as rotary embeddings."""

    def make_norm(self) -> nn.Module:
        """Return the norm before the head."""
        raise NotImplementedError

    @partial(static_steps, parts=("embed", "layer_inputs", "finish"))
    def forward_stage(self, x: torch.Tensor, batch: MicroBatch, stage: Stage) -> torch.Tensor:
        if stage.first:
            x = self.embed(x, batch)
        x = self.run_layers(x, stage, batch, *self.layer_inputs(x, batch))
        return self.finish(x) if stage.last else x

    @static_steps
    def embed(self, ids: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the input of the first layer: int64 [batch, sequence] -> [batch, sequence,
        hidden]."""
        return self.embedding(ids)

    @static_steps
    def layer_inputs(self, x: torch.Tensor, batch: MicroBatch) -> tuple:
        """Return the arguments of every layer after x and the batch, such as a mask. x: [batch,
        sequence, hidden], for its dtype and device."""
        return ()

    @static_steps
    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of the head: [batch, sequence, hidden] -> the same shape."""
        return self.norm(x)
