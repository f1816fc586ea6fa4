"""The keys and values that generation keeps: a new token then takes the forward of one position."""

import torch
from torch import nn


class KVCache:
    """Keys and values of the tokens so far: only of the attention layers, and heads, of this rank.

    Args:
        layers: how many layers extend it, all of them of as many heads.
        length: tokens at most.
        copies: sequences that go on from each row after its prompt: the beams of a search, or the
            answers that are drawn for it.

    Its memory, [layers, keys and values, rows x copies, heads, length, head_size], is allocated
    once, by the first layer. All layers of a forward extend the cache, then `advance` counts its
    tokens.
    """

    def __init__(self, layers: int, length: int, copies: int = 1):
        self.layers, self.length, self.copies = layers, length, copies
        self.used = 0  # tokens
        self.prompt = 0  # of these, the tokens of the first forward, which all copies share
        self._kept: torch.Tensor | None = None
        self._places: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def extend(
        self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's k and v [rows, heads, new tokens, head_size], and return those of all
        tokens so far."""
        if self.used == 0:
            self._begin(layer, k, v)
            return k, v
        keys, values = self._places[layer]
        end = self.used + k.shape[2]
        keys[:, :, self.used : end] = k
        values[:, :, self.used : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, tokens: int) -> None:
        """Count the tokens that every layer has appended."""
        self.prompt = self.prompt or tokens
        self.used += tokens

    def reorder(self, sources: torch.Tensor) -> None:
        """Let row i go on from row sources[i], which has the same prompt. int64 [rows x copies]."""
        moved = (sources != torch.arange(len(sources), device=sources.device)).nonzero()[:, 0]
        # a stage may have no layers
        if self._kept is not None and len(moved) and self.used > self.prompt:
            new = self._kept[:, :, :, :, self.prompt : self.used]
            new[:, :, moved] = new[:, :, sources[moved]]

    def _begin(self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor) -> None:
        rows, heads, tokens, size = k.shape
        if self._kept is None:
            self._kept = k.new_empty(self.layers, 2, rows * self.copies, heads, self.length, size)
        self._places[layer] = tuple(self._kept[len(self._places)])
        for kept, part in zip(self._places[layer], (k, v), strict=True):
            kept.unflatten(0, (rows, self.copies))[:, :, :, :tokens] = part[:, None]
