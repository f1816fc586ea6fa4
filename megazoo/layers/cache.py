"""The keys and values that generation keeps, so that each new token is one forward of one position."""

import torch
from torch import nn


class KVCache:
    """Keys and values of the tokens so far: only of the attention layers, and heads, of this rank.

    Args: length: tokens at most. copies: sequences that go on from each row after its prompt (the beams of a search).

    A layer's memory, [rows x copies, heads, length, head_size] twice, is allocated once, when it first comes. All
    layers of a forward extend the cache, then `advance` counts its tokens.
    """

    def __init__(self, length: int, copies: int = 1):
        self.length, self.copies = length, copies
        self.used = 0  # tokens
        self.prompt = 0  # of these, the tokens of the first forward, which all copies share
        self._kept: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def extend(self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's k and v [rows, heads, new tokens, head_size]; returns those of all tokens so far."""
        if self.used == 0:
            self._kept[layer] = tuple(self._store(part) for part in (k, v))
            return k, v
        keys, values = self._kept[layer]
        end = self.used + k.shape[2]
        keys[:, :, self.used : end] = k
        values[:, :, self.used : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, tokens: int) -> None:
        """Count the tokens that every layer has appended."""
        self.prompt = self.prompt or tokens
        self.used += tokens

    def reorder(self, sources: torch.Tensor) -> None:
        """Row i goes on from row sources[i], int64 [rows x copies], a copy of the same prompt."""
        moved = (sources != torch.arange(len(sources), device=sources.device)).nonzero()[:, 0]
        if len(moved) and self.used > self.prompt:
            new, sources = slice(self.prompt, self.used), sources[moved]
            for part in (part for parts in self._kept.values() for part in parts):
                part[moved, :, new] = part[sources, :, new]

    def _store(self, part: torch.Tensor) -> torch.Tensor:
        rows, heads, tokens, size = part.shape
        kept = part.new_empty(rows, self.copies, heads, self.length, size)
        kept[:, :, :, :tokens] = part[:, None]
        return kept.flatten(0, 1)
