"""Causal self-attention with the heads sharded over the tensor-parallel ranks."""

from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.nn.attention import SDPBackend

from megazoo.errors import UserError
from megazoo.layers.cache import KVCache
from megazoo.layers.context_parallel import attend_across_ranks, check_heads
from megazoo.layers.dropout import Dropout
from megazoo.layers.fused import CosAndSin
from megazoo.layers.layer import Layer
from megazoo.layers.linear import RowParallelLinear
from megazoo.layers.masks import (
    HIDDEN,
    MaskPerChunk,
    MaskPerWindow,
    Packed,
    Shifted,
    masks_of_chunks,
    window_mask,
)
from megazoo.layers.qkv import QKVParallelLinear, split_heads
from megazoo.layers.soft_cap import check_cap, soft_capped_attention
from megazoo.parallel.compile import untraced
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import ShardedModule
from megazoo.parallel.sequence import SequenceCut
from megazoo.torch_internals import attention_kernel, varlen_attention

HALF = (torch.bfloat16, torch.float16)


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


class CausalSelfAttention(Layer):
    """Attend causally with several heads: fused QKV, scaled dot product, output projection.

    The heads are sharded over tp as in QKVParallelLinear.

    Args:
        hidden_size: size of the last dimension of x.
        heads: query heads over all tp ranks.
        kv_heads: key and value heads over all tp ranks; default: heads.
        head_size: features per head; default: hidden_size / heads.
        dropout: dropout probability of the attention weights.
        scale: factor of the scores; default: head_size ** -0.5.
        soft_cap: smooth bound of the scores before the mask, or None. It needs more memory than the
            kernels of torch (see soft_capped_attention) and does not support a Packed mask.
        clip_qkv: bound on the absolute values of queries, keys and values, or None.
        window: number of tokens that a query attends to, including itself; None: all tokens up to
            itself.
        q_norm: module that normalises queries before the rotary embedding, [batch, sequence, this
            rank's heads, head_size] -> the same shape. Because heads differ between tp ranks, use
            RMSNorm(head_size, parallel=True), which normalises each head separately, or
            HeadwiseLayerNorm or HeadwiseRMSNorm, which normalise all heads together.
        k_norm: the same for keys.
        bias: whether both projections have biases.
        output_bias: whether the output projection has a bias; default: bias.
        std: standard deviation of the initial weights of the QKV projection.
        output_std: standard deviation of the initial weights of the output projection.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Raises:
        UserError: The heads can't be split over tp or cp; window is below 1; soft_cap is not above
            0; or q_norm or k_norm is replicated over tp (without parallel=True).

    Example:
        attention = CausalSelfAttention(768, heads=12, kv_heads=4, ctx=ctx)
        y = attention(torch.randn(2, 128, 768))  # [2, 128, 768]

    Source: Vaswani et al. 2017. Grouped queries: Ainslie et al. 2023. Sharding by heads: Shoeybi et
    al. 2019. Normalised queries and keys: Henry et al. 2020. Windows: Beltagy et al. 2020.
    """

    context_parallel = kernel_masks = static_cache = True
    shown = ("soft_cap", "clip_qkv", "window")

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int | None = None,
        head_size: int | None = None,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        soft_cap: float | None = None,
        clip_qkv: float | None = None,
        window: int | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        bias: bool = True,
        output_bias: bool | None = None,
        std: float = 0.02,
        output_std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        self.qkv = QKVParallelLinear(
            hidden_size, heads, kv_heads, head_size, bias, std=std, ctx=ctx
        )
        check_heads(self._fewest_heads(), self.ctx)
        if window is not None and window < 1:
            raise UserError(f"window must be at least 1, got {window}")
        check_cap(soft_cap)
        self.scale, self.soft_cap = scale, soft_cap
        self.clip_qkv, self.window = clip_qkv, window
        self.q_norm, self.k_norm = q_norm, k_norm
        self._check_norms()
        self.dropout = Dropout(dropout, parallel=True, ctx=ctx)
        # if True: save only queries, keys and values up to the output projection
        self.recompute = False
        inputs, unit = heads * self.qkv.head_size, self.qkv.units[0]
        output_bias = bias if output_bias is None else output_bias
        self.output = RowParallelLinear(
            inputs, hidden_size, output_bias, unit=unit, std=output_std, ctx=ctx
        )

    def forward(
        self,
        x: torch.Tensor,
        seed: int | None = None,
        rotary: CosAndSin | None = None,
        mask: torch.Tensor | Packed | MaskPerChunk | MaskPerWindow | None = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """Return the attention output, [batch, sequence, hidden].

        Args:
            x: [batch, sequence, hidden]. Under sequence parallelism it is this rank's part of the
                sequence, as in ColumnParallelLinear. Under context parallelism it is this rank's
                part of the sequence, as in SequenceCut.
            seed: seed of the dropout, as in Dropout.
            rotary: cos and sin from Rotary, which rotate queries and keys.
            mask: None: causal. Otherwise a tensor that expands to [batch, this rank's heads,
                sequence, sequence]: boolean, True where a query may attend (see segment_mask), or
                added to the scores, -inf where it may not (see alibi_bias). Also Packed, if
                takes_packed returns True; or MaskPerWindow, which has one mask per window. Under
                context parallelism, use None or MaskPerChunk. Tokens beyond the window are hidden
                for every mask.
            cache: keys and values of the tokens before x; those of x are appended.
        """
        qkv = self.qkv.project(x)
        if self.clip_qkv:
            qkv = qkv.clamp(-self.clip_qkv, self.clip_qkv)
        if self.q_norm is not None or self.k_norm is not None:
            qkv = self._normalised(qkv)
        attend = partial(self._attend, rotary=rotary, mask=mask, seed=seed, cache=cache)
        if self.recompute:
            return self.output(qkv, recompute=attend)
        return self.output(attend(qkv))

    def extra_repr(self) -> str:
        size, here = self.qkv.head_size, self.qkv.local_parts
        heads, kv_heads, _ = (
            f"{mine // size} of {whole // size}"
            for mine, whole in zip(here, self.qkv.shard.parts, strict=True)
        )
        text = f"heads={heads}, kv_heads={kv_heads}, head_size={size}"
        return ", ".join(filter(None, [text, super().extra_repr()]))

    def _check_norms(self) -> None:
        """Raise UserError for norms whose gradients would lack the contributions of other tp
        ranks."""
        norms = [module for norm in (self.q_norm, self.k_norm) if norm for module in norm.modules()]
        for norm in norms:
            specs = norm.specs.values() if isinstance(norm, ShardedModule) else ()
            if self.ctx.tp_size > 1 and any(spec.shard is None for spec in specs):
                raise UserError(
                    "q_norm and k_norm must be created with parallel=True, because queries and "
                    "keys differ between tp ranks"
                )

    def _normalised(self, qkv: torch.Tensor) -> torch.Tensor:
        """Normalise q and k in a tensor of q, k and v, which are concatenated."""
        size = self.qkv.head_size
        q, k, v = (
            rearrange(part, "batch seq (heads size) -> batch seq heads size", size=size)
            for part in qkv.split(self.qkv.local_parts, dim=-1)
        )
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        return rearrange(
            torch.cat([q, k, v], dim=2), "batch seq heads size -> batch seq (heads size)"
        )

    def _attend(
        self,
        qkv: torch.Tensor,
        rotary: CosAndSin | None,
        mask: torch.Tensor | Packed | MaskPerChunk | MaskPerWindow | None,
        seed: int | None,
        cache: KVCache | None,
    ) -> torch.Tensor:
        """Attend with concatenated q, k and v: [batch, sequence, this rank's features of all three]
        -> [batch, sequence, this rank's features]."""
        q, k, v = split_heads(qkv, self.qkv.local_parts, self.qkv.head_size, rotary)
        given = mask.masks[self.window] if isinstance(mask, MaskPerWindow) else mask
        if cache is not None:
            k, v = cache.extend(self, k, v)
            given = cache.hide(self, given, q)
        mask = given if isinstance(mask, MaskPerWindow) else self._within_window(given, q, k)
        if self.dropout.active:
            y = self._attend_with_dropout(q, k, v, mask, seed)
        else:
            y = self._attend_to_all(q, k, v, mask)
        return rearrange(y, "batch heads seq size -> batch seq (heads size)")

    def _attend_to_all(self, q, k, v, mask, dropout: float = 0.0) -> torch.Tensor:
        """Return softmax(q k^T * scale + mask) v, over all ranks that hold a part of the
        sequence."""
        if self.ctx.cp_size == 1:
            return self._attend_here(q, k, v, mask, dropout)
        return self._attend_across_ranks(q, k, v, mask, dropout)

    @untraced
    def _attend_across_ranks(
        self, q, k, v, mask: MaskPerChunk | None, dropout: float
    ) -> torch.Tensor:
        ctx = self.ctx
        if mask is None:
            cut = SequenceCut.of(q.shape[2] * ctx.cp_size, ctx)
            assert cut  # there are several ranks
            packed = self.takes_packed(q.dtype) and q.device.type != "cpu"
            mask = masks_of_chunks(
                cut, len(q), q.dtype, q.device, packed=packed, window=self.window
            )
        elif not isinstance(mask, MaskPerChunk):
            raise UserError(
                "under context parallelism, the attention mask must be a MaskPerChunk, which "
                "covers the full sequence: create it with megazoo.models.masks.mask_of"
            )
        kernel = partial(self._attend_here, dropout=dropout)
        return attend_across_ranks(kernel, q, k, v, mask, ctx, keep=bool(self.recompute))

    def _within_window(self, mask, q, k) -> torch.Tensor | Packed | MaskPerChunk | None:
        """Return the mask with all tokens beyond the window hidden.

        Without a mask, but with fewer queries than keys, return a mask for queries that are the
        last of the keys. A Packed mask is returned as it is, because its kernel applies the window.
        For a single query, a cache returns no keys beyond the window.
        """
        queries, keys = q.shape[2], k.shape[2]
        window = self.window or keys
        if mask is None and 1 < queries < keys and self.ctx.cp_size == 1:
            return window_mask(queries, keys, window, q.device)
        if self.window is None or isinstance(mask, Packed):
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

    def _attend_here(self, q, k, v, mask, dropout: float = 0.0) -> torch.Tensor:
        """Return softmax(q k^T * scale + mask) v for keys that are all on this rank."""
        if isinstance(mask, Packed):
            return self._attend_in_documents(q, k, v, mask)
        if isinstance(mask, Shifted):
            y = self._scaled_dot_product(q.flip(2), k, v, mask.of_flipped(), dropout)
            return y.flip(2)
        return self._scaled_dot_product(q, k, v, mask, dropout)

    def takes_packed(self, dtype: torch.dtype) -> bool:
        """Return whether the mask may be Packed.

        It requires half precision, no active dropout, no soft cap, and a head size that is a
        multiple of 8 and at most 256. On CUDA it requires Ampere or newer.
        """
        size, device = self.qkv.head_size, self.ctx.device
        if self.soft_cap is not None or self.dropout.active:
            return False
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return False
        return dtype in HALF and size % 8 == 0 and size <= 256

    @untraced
    def _attend_in_documents(self, q, k, v, packed: Packed) -> torch.Tensor:
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
        self, q, k, v, mask: torch.Tensor | None, dropout: float = 0.0
    ) -> torch.Tensor:
        """Return softmax(q k^T * scale + mask) v."""
        if mask is not None:  # the fast kernels of torch need masks of four dimensions
            mask = mask[(None,) * (4 - mask.dim())]
        if self.soft_cap is not None:
            return soft_capped_attention(q, k, v, mask, dropout, self.scale, self.soft_cap)
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and q.shape[2] == 1:
            return self._one_query(q, k, v, mask, dropout)
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

    @untraced
    def _attend_with_dropout(
        self, q, k, v, mask: torch.Tensor | None, seed: int | None
    ) -> torch.Tensor:
        with self.dropout.draw(seed, q.device):
            return self._attend_to_all(q, k, v, mask, self.dropout.probability)

    def _fewest_heads(self) -> int:
        """Return the smallest number of query heads on any tp rank."""
        shard, tp = self.qkv.shard, self.ctx.tp_size
        return min(shard.local_sizes(tp, rank)[0] for rank in range(tp)) // self.qkv.head_size

    @property
    def heads(self) -> range:
        """The global indices of the query heads of this rank."""
        cut = self.qkv.shard.cuts(self.ctx.tp_size, self.ctx.tp_rank)[0]
        size = self.qkv.head_size
        return range(cut.global_start // size, (cut.global_start + cut.length) // size)
