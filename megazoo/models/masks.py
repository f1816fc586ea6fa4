"""What a stage of a model gives to all its layers to hide tokens from each other."""

import torch
from torch import nn

from megazoo.engine.microbatch import MicroBatch
from megazoo.layers import CausalSelfAttention, Packed, segment_mask
from megazoo.layers.masks import additive


def mask_of(
    batch: MicroBatch, layers: nn.ModuleDict, block: type[nn.Module], dtype: torch.dtype
) -> torch.Tensor | Packed | None:
    """Return what hides a micro-batch's segments from each other, as CausalSelfAttention takes it;
    None where there is one segment.

    block: the family's class of layers, which gives the mask to its attention and to nothing else.
    A layer with a forward or an attention of its own gets what `segment_mask` returns. dtype: of
    the activations.
    """
    if batch.segments is None:
        return None
    layers = list(layers.values())
    plain = all(
        type(layer).forward is block.forward and type(layer.attention) is CausalSelfAttention
        for layer in layers
    )
    packed = plain and batch.boundaries is not None
    if packed and all(layer.attention.takes_packed(dtype) for layer in layers):
        return Packed(batch.boundaries, batch.shape[1])
    mask = segment_mask(batch.segments, batch.shape[1])
    return additive(mask, dtype) if plain else mask
