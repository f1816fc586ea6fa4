"""The keys and values that generation keeps: a new token then takes the forward of one position."""

from collections.abc import Iterator

import torch
from torch import nn

from megazoo.layers.layer import declared
from megazoo.layers.masks import HIDDEN, MaskPerChunk, Packed

MaskOfLayer = torch.Tensor | Packed | MaskPerChunk | None


class KVCache:
    """Keys and values of the tokens so far: only of the attention layers, and heads, of this rank.

    Args:
        length: tokens at most.
        copies: sequences that go on from each row after its prompt: the beams of a search, or the
            answers that are drawn for it.
        prompt: tokens that the copies share, which come in one forward or in several; by default
            those of the first forward.
        windows: whether layers with a window keep the tokens of their window alone, not all.

    A layer's memory, [keys and values, rows x copies, heads, places, head_size], is allocated once,
    by its first forward. It has `length` places; or, if the layer says in `window` that a query
    looks at fewer tokens, so many, and token t is in place t % window. All layers of a forward
    extend the cache, then `advance` counts its tokens. Forwards of the prompt have `rows` rows,
    those after it rows x copies.
    """

    def __init__(self, length: int, copies: int = 1, *, prompt: int = 0, windows: bool = True):
        self.length, self.copies, self.prompt, self.windows = length, copies, prompt, windows
        self.used = 0  # tokens
        self.position: torch.Tensor | None = None  # of a StaticKVCache
        self._kept: dict[nn.Module, torch.Tensor] = {}  # of each layer

    @property
    def in_prompt(self) -> bool:
        """Whether the next forward takes tokens of the prompt."""
        return self.used == 0 or self.used < self.prompt

    def keys(self, tokens: int) -> int:
        """Return how many keys so many new tokens look at."""
        return self.used + tokens

    def extend(
        self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's k and v [rows, heads, new tokens, head_size], and return those of all
        tokens so far.

        A layer that keeps a window alone gets, for one new token, what that looks at, in the order
        of its places; for several, those and all that was kept before, in the order of the tokens.
        """
        if self.used == 0:
            self._begin(layer, k, v)
            return k, v
        kept, new = self._kept[layer], k.shape[2]
        of_rows = kept[:, :: kept.shape[1] // len(k)]  # the copies of a row have the same
        if new == 1 or self.used + new <= kept.shape[3]:
            self._store(kept, k, v)
            keys, values = of_rows[:, :, :, : self.used + new]
            return keys, values
        before = of_rows[:, :, :, self._places_in_order(kept)]  # some are about to be overwritten
        self._store(kept, k, v)
        return torch.cat([before[0], k], dim=2), torch.cat([before[1], v], dim=2)

    def hide(self, layer: nn.Module, mask: MaskOfLayer, like: torch.Tensor) -> MaskOfLayer:
        """Return a layer's attention mask (see CausalSelfAttention), which is of all tokens, for
        the keys of `extend`."""
        places, newest = self._kept[layer].shape[3], self.used
        if mask is None or newest == 0:
            return mask
        assert isinstance(mask, torch.Tensor)  # documents are packed in one forward alone
        if mask.shape[-1] <= places:
            return mask
        if mask.shape[-1] > newest + 1:  # of several new tokens
            return mask[..., max(newest - places, 0) :]
        return mask[..., _tokens_in(places, newest, mask.device)]

    def begin_with(self, prefix: "KVCache", padding: torch.Tensor, places: int) -> None:
        """Give all rows the tokens of another cache, which has all of them, of one row.

        padding: int64 [rows], in how many places of a row the prefix is yet to begin: nobody may
        look at these. places: how many are filled of each row; tokens that come after are left out.
        """
        token = torch.arange(places, device=padding.device) - padding[:, None]  # [rows, places]
        for layer, kept in prefix._kept.items():
            k, v = kept[:, 0, :, token.clamp(min=0)].transpose(1, 2)
            self._begin(layer, k, v)
        self.advance(places)

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
        """Keep the first tokens' keys and values, or the last ones of them, for all copies."""
        rows, heads, _, size = k.shape
        window = declared(layer, "window") if self.windows else None
        places = min(self.length, window or self.length)
        kept = self._allocate((2, rows * self.copies, heads, places, size), k)
        self._kept[layer] = kept
        self._store(kept, k, v)

    def _store(self, kept: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put new keys and values, or the last ones of them, into their places, for all copies."""
        places, tokens = kept.shape[3], k.shape[2]
        new = min(tokens, places)
        place = (self.used + tokens - new) % places
        fitting = min(new, places - place)  # the others come round to the first places
        for own, part in zip(kept, (k, v), strict=True):
            of_copies, last = own.unflatten(0, (len(k), -1)), part[:, None, :, tokens - new :]
            of_copies[:, :, :, place : place + fitting] = last[:, :, :, :fitting]
            if fitting < new:
                of_copies[:, :, :, : new - fitting] = last[:, :, :, fitting:]

    def _places_in_order(self, kept: torch.Tensor) -> torch.Tensor:
        """Return the places of the tokens that are kept, the oldest first: int64 [tokens]."""
        places = kept.shape[3]
        oldest = max(self.used - places, 0)
        return torch.arange(oldest, self.used, device=kept.device) % places

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
    position: torch.Tensor

    def __init__(self, length: int, copies: int, device: torch.device, *, prompt: int = 0):
        super().__init__(-(-length // self.BUCKET) * self.BUCKET, copies, prompt=prompt)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._numbers = torch.arange(self.length, device=device)
        self._nothing: torch.Tensor | None = None  # a mask that hides no place: [1, 1, 1, length]
        # for each number of places the newest mask, without and with the empty places hidden
        self._hidden: dict[int, tuple] = {}

    def keys(self, tokens: int) -> int:
        """Return how many places so many new tokens look at: of the prompt its tokens alone."""
        if self.in_prompt:
            return super().keys(tokens)
        bucket = self.BUCKET
        while bucket < self.used + tokens:
            bucket *= 2
        return min(bucket, self.length)

    def extend(
        self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.in_prompt:
            return super().extend(layer, k, v)
        kept = self._kept[layer]
        place = self.position % kept.shape[3]
        for old, part in zip(kept, (k, v), strict=True):
            old.index_copy_(2, place, part)
        keys, values = kept[:, :, :, : self.keys(1)]
        return keys, values

    def hide(self, layer: nn.Module, mask: MaskOfLayer, like: torch.Tensor) -> MaskOfLayer:
        """Return the mask with HIDDEN where there is no token yet: made by the first layer of so
        many places, and by later ones whose mask is another. like: a tensor of the mask's dtype."""
        if self.in_prompt:
            return super().hide(layer, mask, like)
        assert mask is None or isinstance(mask, torch.Tensor)  # as there
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
