"""The keys and values that generation keeps: a new token then takes the forward of one position."""

import torch
from torch import nn

from megazoo.layers.masks import HIDDEN


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
        self.position: torch.Tensor | None = None  # of a StaticKVCache
        self._kept: torch.Tensor | None = None
        self._places: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def keys(self, tokens: int) -> int:
        """Return how many keys so many new tokens look at."""
        return self.used + tokens

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

    def hide(
        self, layer: nn.Module, mask: torch.Tensor | None, like: torch.Tensor
    ) -> torch.Tensor | None:
        """Return a layer's attention mask (see CausalSelfAttention) for the keys of `extend`."""
        return mask

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
            shape = (self.layers, 2, rows * self.copies, heads, self.length, size)
            self._kept = self._allocate(shape, k)
        self._places[layer] = tuple(self._kept[len(self._places)])
        for kept, part in zip(self._places[layer], (k, v), strict=True):
            kept.unflatten(0, (rows, self.copies))[:, :, :, :tokens] = part[:, None]

    def _allocate(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(shape)


class StaticKVCache(KVCache):
    """A cache for steps of one token whose shapes and addresses stay the same: for GPUs, which then
    replay a whole step as one CUDA graph.

    Same as: KVCache. Where a token goes is read from `position`, an int64 tensor [1] on `device`.
    Attention looks at the places of a whole bucket, and a mask hides those that have no token yet.
    Buckets have 64, 128, 256 ... places, so that there are few of them and each row is aligned.
    """

    BUCKET = 64

    def __init__(self, layers: int, length: int, copies: int, device: torch.device):
        super().__init__(layers, -(-length // self.BUCKET) * self.BUCKET, copies)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._numbers = torch.arange(self.length, device=device)
        self._nothing: torch.Tensor | None = None  # a mask that hides no place: [1, 1, 1, length]
        self._hidden: tuple = (None, None)  # the newest mask, without and with the empty places

    def keys(self, tokens: int) -> int:
        """Return how many places so many new tokens look at: of the prompt its tokens alone."""
        if self.used == 0:
            return tokens
        bucket = self.BUCKET
        while bucket < self.used + tokens:
            bucket *= 2
        return min(bucket, self.length)

    def extend(
        self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.used == 0:
            return super().extend(layer, k, v)
        end, places = self.keys(1), self._places[layer]
        for kept, part in zip(places, (k, v), strict=True):
            kept.index_copy_(2, self.position, part)
        return tuple(kept[:, :, :end] for kept in places)

    def hide(
        self, layer: nn.Module, mask: torch.Tensor | None, like: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the mask with HIDDEN where there is no token yet: made by the first layer, and by
        later ones whose mask is another. like: a tensor of the mask's dtype."""
        if self.used == 0:
            return mask
        if layer is next(iter(self._places)) or mask is not self._hidden[0]:
            self._hidden = (mask, self._without_empty_places(mask, like))
        return self._hidden[1]

    def _without_empty_places(self, mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        end = self.keys(1)
        empty = self._numbers[:end] > self.position
        if mask is not None and mask.dtype != torch.bool:
            return mask.masked_fill(empty, HIDDEN)
        if self._nothing is None:
            self._nothing = like.new_zeros(1, 1, 1, self.length)
        hidden = empty if mask is None else empty | ~mask
        return self._nothing[..., :end].masked_fill(hidden, HIDDEN)

    def advance(self, tokens: int) -> None:
        super().advance(tokens)
        self.position += tokens

    def reorder(self, sources: torch.Tensor) -> None:
        """Let row i go on from row sources[i]: every row is copied, so that nobody has to know
        which."""
        if self._kept is not None and self.used > self.prompt:
            new = self._kept[:, :, :, :, self.prompt : self.used]
            new.copy_(new.index_select(2, sources))

    def _allocate(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(shape)  # a NaN would not be hidden
