"""The cache of keys and values for generation: with it, a new token needs a forward of one position
only."""

from collections.abc import Iterator

import torch
from torch import nn

from megazoo.layers import fused
from megazoo.layers.fused import replaced_by
from megazoo.layers.layer import declared
from megazoo.layers.masks import HIDDEN, MaskPerChunk, Packed, Paged
from megazoo.parallel.compile import untraced

MaskOfLayer = torch.Tensor | Packed | Paged | MaskPerChunk | None


class KVCache:
    """Store keys and values of the tokens so far, for the attention layers and heads of this rank.

    The memory of a layer, [keys and values, rows x copies, heads, slots, head_size], is allocated
    once, in its first forward. It has `length` slots. A layer that declares a smaller `window` has
    only `window` slots, and token t is in slot t % window. All layers of a forward extend the
    cache, then `advance` counts the new tokens. Forwards of the prompt have `rows` rows, later ones
    rows x copies.

    Args:
        length: maximum number of tokens.
        copies: number of sequences that continue each row after its prompt: beams, or samples.
        prompt: number of tokens that the copies share, which may arrive in several forwards;
            default: the tokens of the first forward.
        windows: whether layers with a window store only the tokens in their window.
    """

    def __init__(self, length: int, copies: int = 1, *, prompt: int = 0, windows: bool = True):
        self.length, self.copies, self.prompt, self.windows = length, copies, prompt, windows
        self.used = 0  # tokens
        self.position: torch.Tensor | None = None  # of a StaticKVCache
        # whether a layer without a window had a mask in the prompt: its steps need one, too
        self.masked = False
        self._kept: dict[nn.Module, torch.Tensor] = {}  # memory per layer

    @property
    def in_prompt(self) -> bool:
        """Whether the next forward has tokens of the prompt."""
        return self.used == 0 or self.used < self.prompt

    def keys(self, tokens: int) -> int:
        """Return the number of keys that `tokens` new tokens attend to."""
        return self.used + tokens

    def for_layer(self, layer: nn.Module) -> "KVCache":
        """Return the cache for a layer of the model, which may contain attention layers: the cache
        itself, except in a step with a StaticKVCache."""
        return self

    @untraced
    def extend(
        self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of new tokens, and return those to attend to.

        A layer that stores only its window returns, for one new token, the tokens of the window, in
        slot order. For several new tokens, it returns them and all tokens stored before, in token
        order. Otherwise the result has all tokens so far.

        Args:
            layer: the attention layer.
            k, v: [rows, heads, new tokens, head_size].

        Returns:
            The keys and the values, each [rows, heads, keys, head_size].
        """
        if self.used == 0:
            self._begin(layer, k, v)
            return k, v
        kept, new = self._kept[layer], k.shape[2]
        of_rows = kept[:, :: kept.shape[1] // len(k)]  # copies of a row are equal
        if new == 1 or self.used + new <= kept.shape[3]:
            self._store(kept, k, v)
            keys, values = of_rows[:, :, :, : self.used + new]
            return keys, values
        before = of_rows[:, :, :, self._places_in_order(kept)]  # some are about to be overwritten
        self._store(kept, k, v)
        return torch.cat([before[0], k], dim=2), torch.cat([before[1], v], dim=2)

    @untraced
    def hide(self, layer: nn.Module, mask: MaskOfLayer, like: torch.Tensor) -> MaskOfLayer:
        """Return the mask for the keys that `extend` returns.

        Args:
            layer: the attention layer.
            mask: its mask (see CausalSelfAttention) for all tokens.
            like: a tensor with the dtype of additive masks.
        """
        places, newest = self._kept[layer].shape[3], self.used
        has_all = declared(layer, "window") is None
        self.masked |= newest == 0 and has_all and isinstance(mask, torch.Tensor)
        if mask is None or newest == 0:
            return mask
        assert isinstance(mask, torch.Tensor)  # masks are Packed only without earlier tokens
        if mask.shape[-1] <= places:
            return mask
        if mask.shape[-1] > newest + 1:  # several new tokens
            return mask[..., max(newest - places, 0) :]
        return mask[..., _tokens_in(places, newest, mask.device)]

    def begin_with(self, prefix: "KVCache", padding: torch.Tensor, places: int) -> None:
        """Start all rows with the tokens of another cache, which has one row and stores all its
        tokens.

        Args:
            prefix: the other cache.
            padding: int64 [rows], the number of slots before the prefix in each row. The mask must
                hide them.
            places: number of slots to fill in each row; later tokens of the prefix are dropped.
        """
        token = torch.arange(places, device=padding.device) - padding[:, None]  # [rows, places]
        for layer, kept in prefix._kept.items():
            k, v = kept[:, 0, :, token.clamp(min=0)].transpose(1, 2)
            self._begin(layer, k, v)
        self.masked = prefix.masked
        self.advance(places)

    def advance(self, tokens: int) -> None:
        """Count the tokens that every layer has appended."""
        self.prompt = self.prompt or tokens
        self.used += tokens

    def reorder(self, sources: torch.Tensor) -> None:
        """Replace row i by row sources[i], which must have the same prompt. sources: int64 [rows x
        copies]."""
        moved = (sources != torch.arange(len(sources), device=sources.device)).nonzero()[:, 0]
        for new in self._after_prompt() if len(moved) else ():
            new[:, moved] = new[:, sources[moved]]

    def _after_prompt(self) -> Iterator[torch.Tensor]:
        """Yield, per layer, the slots of the tokens after the prompt, or all slots if the two are
        mixed: [keys and values, rows x copies, heads, slots, head_size]."""
        for kept in self._kept.values() if self.used > self.prompt else ():
            yield kept if self.used > kept.shape[3] else kept[:, :, :, self.prompt : self.used]

    def _begin(self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor) -> None:
        """Allocate the memory of a layer and store the first tokens (or the last of them), for all
        copies."""
        rows, heads, _, size = k.shape
        window = declared(layer, "window") if self.windows else None
        places = min(self.length, window or self.length)
        kept = self._allocate((2, rows * self.copies, heads, places, size), k)
        self._kept[layer] = kept
        self._store(kept, k, v)

    def _store(self, kept: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write new keys and values (or the last of them) to their slots, for all copies."""
        places, tokens = kept.shape[3], k.shape[2]
        new = min(tokens, places)
        place = (self.used + tokens - new) % places
        fitting = min(new, places - place)  # the others wrap around to the first slots
        for own, part in zip(kept, (k, v), strict=True):
            of_copies, last = own.unflatten(0, (len(k), -1)), part[:, None, :, tokens - new :]
            of_copies[:, :, :, place : place + fitting] = last[:, :, :, :fitting]
            if fitting < new:
                of_copies[:, :, :, : new - fitting] = last[:, :, :, fitting:]

    def _places_in_order(self, kept: torch.Tensor) -> torch.Tensor:
        """Return the slots of the stored tokens, oldest first: int64 [tokens]."""
        places = kept.shape[3]
        oldest = max(self.used - places, 0)
        return torch.arange(oldest, self.used, device=kept.device) % places

    def _allocate(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(shape)


class StaticKVCache(KVCache):
    """A cache with constant shapes and addresses for steps of one token, so that a GPU can replay a
    whole step as one CUDA graph.

    Same as: KVCache. The slot of a token is read from `position`, an int64 tensor [1] on `device`.
    Attention covers all slots of a bucket, and a mask hides the empty ones. Buckets have 64, 128,
    256 ... slots, so there are few of them, and each row is aligned.

    If `paged` is True, and no layer without a window has a mask, the memory of each row is a page.
    Attention then gets Paged and reads only the tokens so far. Its shape is the same for all of
    them. A layer with a window gets Paged if the window is a multiple of PAGE.

    Args:
        length: maximum number of tokens, rounded up to a multiple of BUCKET, or of PAGE.
        copies: as in KVCache.
        device: of the cache.
        prompt: as in KVCache.
        paged: whether all attention layers support Packed, and their device supports pages (see
            torch_internals.takes_pages).
    """

    BUCKET = 64
    PAGE = 256  # FlashAttention needs pages with a multiple of this number of slots
    position: torch.Tensor

    def __init__(
        self,
        length: int,
        copies: int,
        device: torch.device,
        *,
        prompt: int = 0,
        paged: bool = False,
    ):
        block = self.PAGE if paged else self.BUCKET
        super().__init__(-(-length // block) * block, copies, prompt=prompt)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.numbers = torch.arange(self.length, device=device)
        self.may_use_pages = paged
        self._first: torch.Tensor | None = None  # of each row, and the end: int32 [rows + 1]
        self._nothing: torch.Tensor | None = None  # a mask that hides no slot: [1, 1, 1, length]
        # by number of slots: what the layers share in the newest step
        self._shared: dict[int, SharedByLayers] = {}
        # by layer of the model: the attention layers in it
        self._inside: dict[nn.Module, list[nn.Module]] = {}

    @property
    def paged(self) -> bool:
        """Whether the steps of one token use pages."""
        return self.may_use_pages and not self.masked

    def keys(self, tokens: int) -> int:
        """Return the number of slots that `tokens` new tokens attend to (during the prompt: only
        the prompt's own)."""
        if self.in_prompt:
            return super().keys(tokens)
        if self.paged:
            return self.length
        bucket = self.BUCKET
        while bucket < self.used + tokens:
            bucket *= 2
        return min(bucket, self.length)

    def for_layer(self, layer: nn.Module) -> KVCache:
        """Return the part of the cache that a layer of the model needs in a step of one token.

        That of the first layer begins the step. A layer with several attention layers gets the
        cache itself.
        """
        if self.in_prompt:
            return self
        if layer not in self._inside:
            self._inside[layer] = [each for each in layer.modules() if each in self._kept]
        inside = self._inside[layer]
        return self._of_attention(inside[0]) if len(inside) == 1 else self

    def _of_attention(self, layer: nn.Module) -> "CacheOfLayer":
        """Return the part of the cache of an attention layer, in a step of one token."""
        if layer is next(iter(self._kept)):
            self._shared.clear()
        memory = self._kept[layer]
        slots = memory.shape[3]
        if slots not in self._shared:
            self._shared[slots] = self._begin_step(memory, slots)
        return CacheOfLayer(self, memory, self._shared[slots])

    def _begin_step(self, memory: torch.Tensor, slots: int) -> "SharedByLayers":
        """Return what the layers with this number of slots share in a step."""
        place = self.position if slots == self.length else self.position % slots
        end = min(self.keys(1), slots)
        if self._nothing is None:
            self._nothing = memory.new_zeros(1, 1, 1, self.length)
        shared = SharedByLayers(self.position, place, self.numbers[:end], slots, self._nothing)
        if self.paged and slots % self.PAGE == 0:
            shared.given = self._pages(memory.shape[1], slots)
        elif not self.masked:
            shared.given = shared.without_empty_slots(None)
        return shared

    def _pages(self, rows: int, slots: int) -> Paged:
        if self._first is None:
            self._first = torch.arange(rows + 1, dtype=torch.int32, device=self.position.device)
        used = self._first.new_empty(rows)
        torch.add(self.position.expand(rows), 1, out=used)
        if slots < self.length:
            used.clamp_(max=slots)
        return Paged(used, self._first[:rows, None], self._first, self._first * slots)

    @untraced
    def extend(
        self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.in_prompt:
            return super().extend(layer, k, v)
        return self._of_attention(layer).extend(layer, k, v)

    @untraced
    def hide(self, layer: nn.Module, mask: MaskOfLayer, like: torch.Tensor) -> MaskOfLayer:
        """Return Paged, or the mask with HIDDEN at the empty slots. `extend` is called before it.

        like: a tensor with the dtype of the mask.
        """
        if self.in_prompt:
            return super().hide(layer, mask, like)
        memory = self._kept[layer]
        return CacheOfLayer(self, memory, self._shared[memory.shape[3]]).hide(layer, mask, like)

    def advance(self, tokens: int) -> None:
        super().advance(tokens)
        self.position += tokens

    def reorder(self, sources: torch.Tensor) -> None:
        """Replace row i by row sources[i]. All rows are copied, so the host does not wait for the
        indices."""
        for new in self._after_prompt():
            new.copy_(new.index_select(1, sources))

    def _allocate(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        # uninitialised memory may have NaN, which a mask does not hide
        return like.new_zeros(shape)


class SharedByLayers:
    """What the layers with the same number of slots share in a step of one token.

    position: that of the token, int64 [1]. place: its slot. numbers: of the slots to attend to.
    slots: of a layer. nothing: a mask that hides no slot. given: the mask of layers without
    another one, or Paged.
    """

    def __init__(
        self,
        position: torch.Tensor,
        place: torch.Tensor,
        numbers: torch.Tensor,
        slots: int,
        nothing: torch.Tensor,
    ):
        self.position, self.place, self.numbers, self.slots = position, place, numbers, slots
        self.nothing = nothing[..., : len(numbers)]
        self.given: torch.Tensor | Paged | None = None
        self._newest: tuple = ()  # the newest mask, without and with the empty slots hidden

    def hidden(self, mask: torch.Tensor | None) -> MaskOfLayer:
        """Return the mask with the empty slots hidden. Layers with the same mask share the
        result, except under torch.compile."""
        if mask is None and self.given is not None:
            return self.given
        if torch.compiler.is_compiling():
            return self.without_empty_slots(mask)
        if not self._newest or self._newest[0] is not mask:
            self._newest = mask, self.without_empty_slots(mask)
        return self._newest[1]

    def without_empty_slots(self, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the mask with HIDDEN at the empty slots."""
        tokens = self.position - (self.position - self.numbers) % self.slots
        empty = tokens < 0
        if mask is not None and mask.shape[-1] > len(self.numbers):
            mask = mask[..., tokens.clamp(min=0)]  # tokens beyond the window are not stored
        if mask is not None and mask.dtype != torch.bool:
            return mask.masked_fill(empty, HIDDEN)
        hidden = empty if mask is None else empty | ~mask
        return self.nothing.masked_fill(hidden, HIDDEN)


class CacheOfLayer(KVCache):
    """The part of a StaticKVCache of one attention layer, in a step of one token.

    It has no number that changes with the tokens. So torch.compile compiles such a step once, for
    all layers with the same shapes.
    """

    def __init__(self, cache: StaticKVCache, memory: torch.Tensor, shared: SharedByLayers):
        """memory: of the layer, as in KVCache."""
        super().__init__(cache.length, cache.copies, prompt=cache.prompt)
        self.position = cache.position
        self._memory, self._in_step, self._keys = memory, shared, cache.keys(1)

    @property
    def in_prompt(self) -> bool:
        return False

    def keys(self, tokens: int) -> int:
        return self._keys

    def extend(
        self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values to the slot of the token, and return those of all slots to
        attend to: see KVCache.extend."""
        self._memory.index_copy_(3, self._in_step.place, stack_pair(k, v))
        keys, values = self._memory[:, :, :, : len(self._in_step.numbers)]
        return keys, values

    def hide(self, layer: nn.Module, mask: MaskOfLayer, like: torch.Tensor) -> MaskOfLayer:
        """Return Paged, or the mask with HIDDEN at the empty slots."""
        assert mask is None or isinstance(mask, torch.Tensor)  # see KVCache.hide
        return self._in_step.hidden(mask)


@replaced_by(fused.stack_pair)
def stack_pair(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Stack two tensors of the same shape, which is only read: [2, ...]."""
    return torch.stack([k, v])


def _tokens_in(places: int, newest: int, device: torch.device) -> torch.Tensor:
    """Return the token in each slot: int64 [places]. newest: the newest token, places - 1 or
    more."""
    return newest - (newest - torch.arange(places, device=device)) % places
