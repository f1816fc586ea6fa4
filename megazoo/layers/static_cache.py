"""The cache of keys and values with constant shapes and addresses, for steps of one token as a CUDA
graph."""

import torch
from torch import nn

from megazoo.layers import fused
from megazoo.layers.cache import KVCache, MaskOfLayer
from megazoo.layers.fused import replaced_by
from megazoo.layers.masks import HIDDEN, Paged
from megazoo.parallel.compile import untraced


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
