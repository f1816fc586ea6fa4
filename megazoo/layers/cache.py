"""The keys and values that generation keeps: a new token then takes the forward of one position."""

from collections.abc import Iterator

import torch
from torch import nn

from megazoo.layers.masks import HIDDEN


class KVCache:
    """Keys and values of the tokens so far: only of the attention layers, and heads, of this rank.

    Args:
        length: tokens at most.
        copies: sequences that go on from each row after its prompt: the beams of a search, or the
            answers that are drawn for it.

    A layer's memory, [keys and values, rows x copies, heads, places, head_size], is allocated once,
    by its first forward. It has `length` places; or, if the layer says in `window` that a query
    looks at fewer tokens, so many, and token t is in place t % window. All layers of a forward
    extend the cache, then `advance` counts its tokens: those of the prompt, then one at a time
    where a layer has a window.
    """

    def __init__(self, length: int, copies: int = 1):
        self.length, self.copies = length, copies
        self.used = 0  # tokens
        self.prompt = 0  # of these, the tokens of the first forward, which all copies share
        self.position: torch.Tensor | None = None  # of a StaticKVCache
        self._kept: dict[nn.Module, torch.Tensor] = {}  # of each layer

    def keys(self, tokens: int) -> int:
        """Return how many keys so many new tokens look at."""
        return self.used + tokens

    def extend(
        self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's k and v [rows, heads, new tokens, head_size], and return those of all
        tokens so far, or of the last ones that are kept, in the order of their places."""
        if self.used == 0:
            self._begin(layer, k, v)
            return k, v
        kept, new = self._kept[layer], k.shape[2]
        place = self.used % kept.shape[3]
        kept[0, :, :, place : place + new] = k
        kept[1, :, :, place : place + new] = v
        return tuple(kept[:, :, :, : self.used + new])

    def hide(
        self, layer: nn.Module, mask: torch.Tensor | None, like: torch.Tensor
    ) -> torch.Tensor | None:
        """Return a layer's attention mask (see CausalSelfAttention), which is of all tokens, for
        the keys of `extend`."""
        places, newest = self._kept[layer].shape[3], self.used
        if mask is None or newest == 0 or newest < places:
            return mask
        return mask[..., _tokens_in(places, newest, mask.device)]

    def advance(self, tokens: int) -> None:
        """Count the tokens that every layer has appended."""
        self.prompt = self.prompt or tokens
        self.used += tokens

    def reorder(self, sources: torch.Tensor) -> None:
        """Let row i go on from row sources[i], which has the same prompt. int64 [rows x copies]."""
        moved = (sources != torch.arange(len(sources), device=sources.device)).nonzero()[:, 0]
        for new in self._after_prompt() if len(moved) else ():
            new[:, moved] = new[:, sources[moved]]

    def _after_prompt(self) -> Iterator[torch.Tensor]:
        """Yield of each layer the places of the tokens after the prompt, all places where those of
        the prompt are among them: [keys and values, rows x copies, heads, places, head_size]."""
        for kept in self._kept.values() if self.used > self.prompt else ():
            yield kept if self.used > kept.shape[3] else kept[:, :, :, self.prompt : self.used]

    def _begin(self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep the prompt's keys and values, or the last ones of them, for all copies."""
        rows, heads, tokens, size = k.shape
        places = min(self.length, getattr(layer, "window", None) or self.length)
        kept = self._allocate((2, rows * self.copies, heads, places, size), k)
        self._kept[layer] = kept
        of_copies = kept.unflatten(1, (rows, self.copies))
        first = max(tokens - places, 0)
        for copies, part in zip(of_copies, (k, v), strict=True):
            last = part[:, None, :, first:].roll(first % places, dims=3)
            copies[:, :, :, : tokens - first] = last

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

    def __init__(self, length: int, copies: int, device: torch.device):
        super().__init__(-(-length // self.BUCKET) * self.BUCKET, copies)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._numbers = torch.arange(self.length, device=device)
        self._nothing: torch.Tensor | None = None  # a mask that hides no place: [1, 1, 1, length]
        # for each number of places the newest mask, without and with the empty places hidden
        self._hidden: dict[int, tuple] = {}

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
        kept = self._kept[layer]
        place = self.position % kept.shape[3]
        for old, part in zip(kept, (k, v), strict=True):
            old.index_copy_(2, place, part)
        return tuple(kept[:, :, :, : self.keys(1)])

    def hide(
        self, layer: nn.Module, mask: torch.Tensor | None, like: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the mask with HIDDEN where there is no token yet: made by the first layer of so
        many places, and by later ones whose mask is another. like: a tensor of the mask's dtype."""
        if self.used == 0:
            return mask
        if layer is next(iter(self._kept)):
            self._hidden.clear()
        places = self._kept[layer].shape[3]
        known = self._hidden.get(places)
        if known is None or known[0] is not mask:
            self._hidden[places] = (mask, self._without_empty_places(places, mask, like))
        return self._hidden[places][1]

    def _without_empty_places(
        self, places: int, mask: torch.Tensor | None, like: torch.Tensor
    ) -> torch.Tensor:
        end = min(self.keys(1), places)
        tokens = self.position - (self.position - self._numbers[:end]) % places
        empty = tokens < 0
        if mask is not None and mask.shape[-1] > end:  # what is beyond the window is not kept
            mask = mask[..., tokens.clamp(min=0)]
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
        for new in self._after_prompt():
            new.copy_(new.index_select(1, sources))

    def _allocate(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(shape)  # a NaN would not be hidden


def _tokens_in(places: int, newest: int, device: torch.device) -> torch.Tensor:
    """Return which token is in each place: int64 [places]. newest: the last one, places - 1 at
    least."""
    return newest - (newest - torch.arange(places, device=device)) % places
