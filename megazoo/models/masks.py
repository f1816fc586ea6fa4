"""Attention masks, which a stage of a model passes to all its layers."""

import torch
from torch import nn

from megazoo.engine.microbatch import MicroBatch
from megazoo.layers import ALiBi, MaskPerChunk, MaskPerWindow, Packed, segment_mask
from megazoo.layers.layer import Layer, attentions_of, declared
from megazoo.layers.masks import additive, masks_of_chunks, window_mask


def mask_of(
    batch: MicroBatch, layers: nn.ModuleDict, dtype: torch.dtype
) -> torch.Tensor | Packed | MaskPerChunk | MaskPerWindow | None:
    """Return the mask of a micro-batch for CausalSelfAttention. It separates segments and applies
    the layers' windows. None for one segment without a window, if this rank has all its tokens.

    If a layer or its attention does not declare kernel_masks (see `Layer`), the mask is the result
    of `segment_mask`. Under context parallelism it is boolean masks, limited to the windows of the
    attentions that declare kernel_masks. dtype: of the activations.
    """
    cache, whole = batch.cache, batch.cut is None and batch.segments is None
    if cache and cache.used and cache.windows and batch.shape[1] == 1 and whole:
        return None  # a new token attends to all tokens that each layer's cache returns
    modules = list(layers.values())
    if not modules:
        return None
    of_layers = [list(attentions_of(layer)) for layer in modules]
    ours = [each for found in of_layers for each in found if declared(each, "kernel_masks")]
    all_ours = all(of_layers) and len(ours) == sum(map(len, of_layers))
    plain = all_ours and all(declared(layer, "kernel_masks") for layer in modules)
    windows = set() if all_ours else {None}
    if plain or batch.cut is not None:
        windows |= {declared(each, "window") for each in ours}
    else:  # attention itself limits a mask of all tokens to its window
        windows = {None}
    packed = plain and all(isinstance(each, Layer) and each.takes_packed(dtype) for each in ours)
    device = next(modules[0].parameters()).device
    masks = {
        window: _mask_of_window(batch, window, plain, packed, dtype, device) for window in windows
    }
    return masks[None] if windows == {None} else MaskPerWindow(masks)


def _mask_of_window(
    batch: MicroBatch,
    window: int | None,
    plain: bool,
    packed: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | Packed | MaskPerChunk | None:
    """Return the mask for layers with a window (None: all tokens)."""
    if batch.cut is not None:
        return masks_of_chunks(
            batch.cut,
            batch.shape[0],
            dtype if plain else None,
            device,
            segments=batch.segments,
            boundaries=batch.boundaries,
            packed=packed and device.type != "cpu",
            window=window,
        )
    rows, queries = batch.shape
    if packed and batch.boundaries is not None:
        return Packed(batch.boundaries, queries)
    cache = batch.cache if batch.cache and batch.cache.used > 0 else None
    if cache and queries == 1 and cache.windows:
        window = None  # the cache has no tokens outside the window
    narrow = window is not None and batch.keys > window
    if batch.segments is not None:
        mask = segment_mask(batch.segments, queries, window)
    elif narrow and not cache and packed and device.type == "cuda":  # the kernel skips the rest
        return Packed(torch.arange(rows + 1, device=device).int() * queries, queries)
    elif narrow or (cache and queries > 1):
        mask = window_mask(queries, batch.keys, window or batch.keys, device)
    else:
        return None
    return additive(mask, dtype) if plain and mask is not None else mask


def alibi_mask_of(
    batch: MicroBatch, alibi: ALiBi, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | MaskPerChunk:
    """Return the ALiBi bias of a micro-batch for CausalSelfAttention. It also separates
    segments."""
    if batch.cut is None:
        mask = segment_mask(batch.segments, batch.shape[1])
        return alibi(batch.shape[1], batch.keys, dtype, device, mask, batch.position)
    heads, biases = batch.cut.heads(alibi.heads), []
    for chunk in batch.cut.queries:
        keys = None if batch.segments is None else batch.segments[:, : chunk.stop]
        mask = segment_mask(keys, len(chunk))
        biases.append(alibi(len(chunk), chunk.stop, dtype, device, mask, heads=heads))
    return MaskPerChunk(tuple(biases))
