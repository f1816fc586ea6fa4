"""Causal attention to keys and values: the part of an attention layer that has no parameters."""

from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from megazoo.errors import UserError
from megazoo.layers.blocked_attention import blocked_attention, takes_blocks
from megazoo.layers.cache import KVCache
from megazoo.layers.context_parallel import attend_across_ranks, check_heads
from megazoo.layers.dropout import Dropout
from megazoo.layers.layer import Layer
from megazoo.layers.masks import (
    HIDDEN,
    MaskPerChunk,
    MaskPerWindow,
    Packed,
    Paged,
    Shifted,
    masks_of_chunks,
    window_mask,
)
from megazoo.layers.plain_attention import plain_attention
from megazoo.layers.qkv import units_of_heads
from megazoo.layers.soft_cap import check_cap
from megazoo.parallel.compile import untraced
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.sequence import SequenceCut
from megazoo.parallel.shard import Shard
from megazoo.torch_internals import attention_kernel, paged_attention, varlen_attention

HALF = (torch.bfloat16, torch.float16)
Mask = torch.Tensor | Packed | MaskPerChunk | MaskPerWindow | None


class Attend(Layer):
    """Compute softmax(q k^T * scale + mask) v with causal masks, for the heads of this tp rank.

    The heads are sharded over tp by the projections before it. Under context parallelism the ranks
    exchange keys and values, or heads. It has no parameters. An attention layer is projections
    around it: see CausalSelfAttention.

    Args:
        heads: query heads over all tp ranks.
        head_size: features of a query and a key.
        kv_heads: key and value heads over all tp ranks; default: heads.
        value_size: features of a value; default: head_size. The smaller ones are padded with zeros,
            also in the cache, because the kernels of torch need one size.
        scale: factor of the scores; default: head_size ** -0.5.
        soft_cap: smooth bound of the scores before the mask, or None. It needs more memory than the
            kernels of torch (see plain_attention) and does not support a Packed mask.
        sinks: whether forward gets sinks: scores of no key, which take part in the softmax. They
            need as much memory as a soft cap, and do not support a Packed mask.
        window: number of tokens that a query attends to, including itself; None: all tokens up to
            itself.
        dropout: dropout probability of the attention weights.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    A module with both an Attend and a QKVParallelLinear repeats the class attributes of Attend, and
    sets its `score_features` to that of the Attend, so that the scores are counted once.

    Raises:
        UserError: The heads can't be split over tp or cp; window is below 1; or soft_cap is not
            above 0.

    Example:
        attend = Attend(heads=8, head_size=24, value_size=16)
        q, k = torch.randn(2, 2, 8, 128, 24)
        y = attend(q, k, torch.randn(2, 8, 128, 16))  # [2, 128, 8 x 16]

    Source: Vaswani et al. 2017. Grouped queries: Ainslie et al. 2023. Windows: Beltagy et al. 2020.
    """

    context_parallel = kernel_masks = static_cache = True
    shown = ("soft_cap", "window")

    def __init__(
        self,
        heads: int,
        head_size: int,
        kv_heads: int | None = None,
        *,
        value_size: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        window: int | None = None,
        dropout: float = 0.0,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        value_size = value_size or head_size
        unit, *_ = units_of_heads(heads, kv_heads or heads, 1, self.ctx)
        shard, tp = Shard(0, (heads,), (unit,)), self.ctx.tp_size
        check_heads(min(shard.local_sizes(tp, rank)[0] for rank in range(tp)), self.ctx)
        if window is not None and window < 1:
            raise UserError(f"window must be at least 1, got {window}")
        check_cap(soft_cap)
        if scale is None and value_size > head_size:  # the kernels get padded queries
            scale = head_size**-0.5
        self.size = max(head_size, value_size)
        self.value_size = value_size
        self.score_features = heads * (head_size + value_size) // 2
        self.scale, self.soft_cap, self.window = scale, soft_cap, window
        self.has_sinks = sinks
        self.dropout = Dropout(dropout, parallel=True, ctx=ctx)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seed: int | None = None,
        mask: Mask = None,
        cache: KVCache | None = None,
        *,
        sinks: torch.Tensor | None = None,
        keep: bool = False,
    ) -> torch.Tensor:
        """Return the attention output, [batch, sequence, this rank's heads x value_size].

        Args:
            q: [batch, this rank's heads, sequence, head_size], rotated. Under context parallelism
                it is of this rank's part of the sequence, as in SequenceCut.
            k: the same, with this rank's key-value heads.
            v: [batch, this rank's key-value heads, sequence, value_size].
            seed: seed of the dropout, as in Dropout.
            mask: None: causal. Otherwise a tensor that expands to [batch, this rank's heads,
                sequence, sequence]: boolean, True where a query may attend (see segment_mask), or
                added to the scores, -inf where it may not (see alibi_bias). Also Packed, if
                takes_packed returns True; or MaskPerWindow, which has one mask per window. Under
                context parallelism, use None or MaskPerChunk. Tokens beyond the window are hidden
                for every mask.
            cache: keys and values of the tokens before q; k and v are appended.
            sinks: [this rank's heads], with `sinks=True`: a learned score of each head. They are an
                input, like q: a recomputed function gets them as an argument.
            keep: whether a backward follows immediately, as when the attention runs again for it.
                The keys and values of other context-parallel ranks are then saved, and not gathered
                again.

        Raises:
            UserError: sinks are given without `sinks=True`, or missing with it; or a mask is not
                supported under context parallelism.
        """
        if (sinks is not None) != self.has_sinks:
            how = "without sinks" if sinks is None else "with sinks"
            raise UserError(f"an Attend with sinks={self.has_sinks} was called {how}")
        q, k, v = (_padded(x, self.size) for x in (q, k, v))
        given = mask.masks[self.window] if isinstance(mask, MaskPerWindow) else mask
        if cache is not None:
            k, v = cache.extend(self, k, v)
            given = cache.hide(self, given, q)
        hidden = given if isinstance(mask, MaskPerWindow) else self._within_window(given, q, k)
        if self.dropout.active:
            y = self._with_dropout(q, k, v, hidden, sinks, seed, keep)
        else:
            y = self._to_all(q, k, v, hidden, sinks, keep)
        y = y if self.value_size == self.size else y[..., : self.value_size]
        return y.transpose(1, 2).flatten(2)

    def takes_packed(self, dtype: torch.dtype) -> bool:
        """Return whether the mask may be Packed.

        It requires half precision, no active dropout, no soft cap, no sinks, and a head size that
        is a multiple of 8 and at most 256. On CUDA it requires Ampere or newer.
        """
        device = self.ctx.device
        if self.soft_cap is not None or self.has_sinks or self.dropout.active:
            return False
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return False
        return dtype in HALF and self.size % 8 == 0 and self.size <= 256

    @untraced
    def _with_dropout(self, q, k, v, mask, sinks, seed: int | None, keep: bool) -> torch.Tensor:
        with self.dropout.draw(seed, q.device):
            return self._to_all(q, k, v, mask, sinks, keep, self.dropout.probability)

    def _to_all(self, q, k, v, mask, sinks, keep: bool, dropout: float = 0.0) -> torch.Tensor:
        """Return softmax(q k^T * scale + mask) v, over all ranks that hold a part of the
        sequence."""
        if self.ctx.cp_size == 1:
            return self._here(q, k, v, mask, dropout, sinks)
        return self._across_ranks(q, k, v, mask, sinks, keep, dropout)

    @untraced
    def _across_ranks(
        self, q, k, v, mask: MaskPerChunk | None, sinks, keep: bool, dropout: float
    ) -> torch.Tensor:
        ctx = self.ctx
        cut = SequenceCut.of(q.shape[2] * ctx.cp_size, ctx)
        assert cut  # there are several ranks
        if mask is None:
            packed = self.takes_packed(q.dtype) and q.device.type != "cpu"
            mask = masks_of_chunks(
                cut, len(q), q.dtype, q.device, packed=packed, window=self.window
            )
        elif not isinstance(mask, MaskPerChunk):
            raise UserError(
                "under context parallelism, the attention mask must be a MaskPerChunk, which "
                "covers the full sequence: create it with megazoo.models.masks.mask_of"
            )
        if sinks is not None:
            heads = cut.heads(range(len(sinks)))
            sinks = sinks[heads.start : heads.stop]
        kernel = partial(self._here, dropout=dropout, sinks=sinks)
        return attend_across_ranks(kernel, q, k, v, mask, ctx, keep=keep)

    def _within_window(self, mask, q, k) -> torch.Tensor | Packed | Paged | MaskPerChunk | None:
        """Return the mask with all tokens beyond the window hidden.

        Without a mask, but with fewer queries than keys, return a mask for queries that are the
        last of the keys. A Packed mask is returned as it is, because its kernel applies the window.
        For a single query, a cache returns no keys beyond the window, and may return Paged.
        """
        queries, keys = q.shape[2], k.shape[2]
        window = self.window or keys
        if mask is None and 1 < queries < keys and self.ctx.cp_size == 1:
            return window_mask(queries, keys, window, q.device)
        if self.window is None or isinstance(mask, Packed | Paged):
            return mask
        if isinstance(mask, MaskPerChunk):
            raise UserError(
                f"a MaskPerChunk does not hide the tokens beyond a window of {self.window}: create "
                "the mask with megazoo.models.masks.mask_of"
            )
        if keys <= window or self.ctx.cp_size > 1:  # masks_of_chunks applies the window
            return mask
        seen = window_mask(queries, keys, window, q.device)
        if mask is None:
            return seen
        if mask.dtype == torch.bool:
            return mask & seen
        return mask.masked_fill(~seen, HIDDEN)

    def _here(self, q, k, v, mask, dropout: float = 0.0, sinks=None) -> torch.Tensor:
        """Return softmax(q k^T * scale + mask) v for keys that are all on this rank."""
        if isinstance(mask, Packed):
            return self._in_documents(q, k, v, mask)
        if isinstance(mask, Paged):
            k, v = (x.transpose(1, 2) for x in (k, v))  # [rows, slots, heads, size]
            return paged_attention(q.squeeze(2), k, v, *mask, self.scale).unsqueeze(2)
        if isinstance(mask, Shifted):
            y = self._scaled_dot_product(q.flip(2), k, v, mask.of_flipped(), dropout, sinks)
            return y.flip(2)
        return self._scaled_dot_product(q, k, v, mask, dropout, sinks)

    @untraced
    def _in_documents(self, q, k, v, packed: Packed) -> torch.Tensor:
        """Return softmax(q k^T * scale) v, causal within each document."""
        rows = len(q)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [tokens, heads, size]
        y = varlen_attention(
            q,
            k,
            v,
            packed.boundaries,
            packed.longest,
            self.scale,
            packed.key_boundaries,
            packed.longest_of_keys,
            window=self.window,
        )
        return y.unflatten(0, (rows, -1)).transpose(1, 2)

    def _scaled_dot_product(
        self, q, k, v, mask: torch.Tensor | None, dropout: float = 0.0, sinks=None
    ) -> torch.Tensor:
        """Return softmax(q k^T * scale + mask) v."""
        if mask is not None:  # the fast kernels of torch need masks of four dimensions
            mask = mask[(None,) * (4 - mask.dim())]
        if self.soft_cap is not None or sinks is not None:
            return plain_attention(q, k, v, mask, dropout, self.scale, self.soft_cap, sinks)
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and q.shape[2] == 1:
            return self._one_query(q, k, v, mask, dropout)
        if takes_blocks(q, k, mask, dropout):
            return blocked_attention(q, k, v, mask, self.scale)
        if groups > 1 and not takes_groups(q, k, v, mask, dropout):
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            # a single query may attend to all keys in the cache
            is_causal=mask is None and q.shape[2] == k.shape[2],
            dropout_p=dropout,
            scale=self.scale,
            enable_gqa=k.shape[1] < q.shape[1],
        )

    def _one_query(self, q, k, v, mask: torch.Tensor | None, dropout: float) -> torch.Tensor:
        """Return softmax(q k^T * scale + mask) v for one query per head.

        The query heads of a group attend to the same keys, so the kernel receives them as several
        queries of one head. k and v are not copied.
        """
        cut = (k.shape[1], q.shape[1] // k.shape[1])
        if mask is not None:
            mask = mask.expand(*q.shape[:3], k.shape[2]).unflatten(1, cut).squeeze(3)
        q = q.unflatten(1, cut).squeeze(3)  # [batch, KV heads, queries of a group, head_size]
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=self.scale)
        return y.flatten(1, 2).unsqueeze(2)


def takes_groups(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
) -> bool:
    """Return whether a fast kernel of torch supports fewer key heads than query heads (grouped
    queries).

    The CPU kernel supports them. On CUDA, FlashAttention (half precision, no mask) and cuDNN (where
    torch prefers it) support them. The memory-efficient kernel does not, and torch would then
    choose the math kernel, which stores all scores.
    """
    if q.device.type != "cuda" or (mask is None and q.dtype in HALF):
        return True
    return _has_fast_kernel(q, k, v, mask, dropout)


@untraced
def _has_fast_kernel(q, k, v, mask: torch.Tensor | None, dropout: float) -> bool:
    return attention_kernel(q, k, v, mask, dropout) != SDPBackend.MATH


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return x with zeros after its features, up to `size` of them."""
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))
