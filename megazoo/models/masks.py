"""What a stage of a model gives to all its layers to hide tokens from each other."""

import torch
from torch import nn

from megazoo.engine.microbatch import MicroBatch
from megazoo.layers import ALiBi, CausalSelfAttention, OfChunks, Packed, segment_mask
from megazoo.layers.masks import additive, masks_of_chunks


def mask_of(
    batch: MicroBatch, layers: nn.ModuleDict, block: type[nn.Module], dtype: torch.dtype
) -> torch.Tensor | Packed | OfChunks | None:
    """Return what hides a micro-batch's segments from each other, as CausalSelfAttention takes it;
    None where there is one segment, of which this rank has all tokens.

    block: the family's class of layers, which gives the mask to its attention and to nothing else.
    A layer with a forward or an attention of its own gets what `segment_mask` returns. dtype: of
    the activations.
    """
    layers = list(layers.values())
    if not layers or (batch.segments is None and batch.cut is None):
        return None
    plain = all(
        type(layer).forward is block.forward and type(layer.attention) is CausalSelfAttention
        for layer in layers
    )
    packed = plain and all(layer.attention.takes_packed(dtype) for layer in layers)
    if batch.cut is not None:
        device = next(layers[0].parameters()).device
        return masks_of_chunks(
            batch.cut,
            batch.shape[0],
            dtype if plain else None,
            device,
            segments=batch.segments,
            boundaries=batch.boundaries,
            packed=packed and device.type != "cpu",
        )
    if packed and batch.boundaries is not None:
        return Packed(batch.boundaries, batch.shape[1])
    mask = segment_mask(batch.segments, batch.shape[1])
    return additive(mask, dtype) if plain else mask


def alibi_mask_of(
    batch: MicroBatch, alibi: ALiBi, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | OfChunks:
    """Return the bias of a micro-batch's distances, which hides its segments from each other, too,
    as CausalSelfAttention takes it."""
    if batch.cut is None:
        mask = segment_mask(batch.segments, batch.shape[1])
        return alibi(batch.shape[1], batch.keys, dtype, device, mask, batch.position)
    heads, biases = batch.cut.heads(alibi.heads), []
    for chunk in batch.cut.queries:
        keys = None if batch.segments is None else batch.segments[:, : chunk.stop]
        mask = segment_mask(keys, len(chunk))
        biases.append(alibi(len(chunk), chunk.stop, dtype, device, mask, heads=heads))
    return OfChunks(tuple(biases))
