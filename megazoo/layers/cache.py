"""The cache of keys and values for generation: with it, a new token needs a forward of one position
only."""

from collections.abc import Iterator

import torch
from torch import nn

from megazoo.layers.layer import declared
from megazoo.layers.masks import MaskPerChunk, Packed, Paged
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
        of_copies = kept.view(2, len(k), kept.shape[1] // len(k), *kept.shape[2:])
        first = tokens - new
        for slot, token, count in ((place, first, fitting), (0, first + fitting, new - fitting)):
            if count:
                slots = of_copies.narrow(4, slot, count)
                for own, part in zip(slots, (k, v), strict=True):
                    own.copy_(part.narrow(2, token, count).unsqueeze(1))

    def _places_in_order(self, kept: torch.Tensor) -> torch.Tensor:
        """Return the slots of the stored tokens, oldest first: int64 [tokens]."""
        places = kept.shape[3]
        oldest = max(self.used - places, 0)
        return torch.arange(oldest, self.used, device=kept.device) % places

    def _allocate(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(shape)


def _tokens_in(places: int, newest: int, device: torch.device) -> torch.Tensor:
    """Return the token in each slot: int64 [places]. newest: the newest token, places - 1 or
    more."""
    return newest - (newest - torch.arange(places, device=device)) % places
