"""Causal self-attention whose heads are cut over the tensor-parallel ranks."""

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
    """Return whether one of torch's fast kernels takes fewer heads of keys than of queries.

    The CPU's does. On CUDA flash does, which is for half precision without a mask, and so does
    cuDNN's where torch prefers it; the one that is left for all else does not, and torch would
    choose the math kernel, which makes all scores.
    """
    if q.device.type != "cuda" or (mask is None and q.dtype in HALF):
        return True
    return _has_fast_kernel(q, k, v, mask, dropout)


@untraced
def _has_fast_kernel(q, k, v, mask: torch.Tensor | None, dropout: float) -> bool:
    return attention_kernel(q, k, v, mask, dropout) != SDPBackend.MATH


class CausalSelfAttention(Layer):
    """Multi-head causal self-attention: fused QKV, scaled dot product, output projection.

    Args:
        hidden_size, heads, kv_heads, head_size: over all tp ranks; cut as in QKVParallelLinear.
        dropout: probability on the attention weights.
        scale: what the scores are multiplied by; head_size ** -0.5 by default.
        soft_cap: a smooth bound of the scores, before the mask, if any: see soft_capped_attention,
            which needs more memory than torch's kernels, and takes no mask that is Packed.
        clip_qkv: bound on the absolute values of queries, keys and values, if any.
        window: how many tokens a query looks at, itself included; all before it by default.
        q_norm, k_norm: modules that normalise queries and keys before they are turned: [batch,
            sequence, this rank's heads, head_size] -> the same. Heads differ between tp ranks:
            RMSNorm(head_size, parallel=True) normalises each alone, HeadwiseLayerNorm all together.
        bias: biases on both projections. output_bias: on the second one; as the first by default.
        std, output_std: standard deviations of the initial weights of the two projections.
        ctx: parallel context; the ambient one by default.

    Shapes: x [batch, sequence, hidden] -> [batch, sequence, hidden]. seed: for the dropout, as in
    Dropout. rotary: cos and sin of Rotary, which turn the queries and keys. mask: of a shape that
    expands to [batch, this rank's heads, sequence, sequence]; boolean, where a query may look (see
    segment_mask), or added to the scores, -inf where it may not (see alibi_bias); or Packed, if
    takes_packed; or MaskPerWindow, of which it takes its own. Without, a query looks at itself and
    backwards. What is beyond the window is hidden, whatever the mask. Under context parallelism x
    is this rank's part of the sequence (see SequenceCut), and the mask, if any, is MaskPerChunk.
    cache: of the tokens before x, which x's are appended to.
    Source: Vaswani et al. 2017; grouped queries: Ainslie et al. 2023; the cut by heads: Shoeybi et
    al. 2019; normalised queries and keys: Henry et al. 2020; windows: Beltagy et al. 2020.
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
            raise UserError(f"a window of {window} tokens has no place for the token itself")
        check_cap(soft_cap)
        self.scale, self.soft_cap = scale, soft_cap
        self.clip_qkv, self.window = clip_qkv, window
        self.q_norm, self.k_norm = q_norm, k_norm
        self._check_norms()
        self.dropout = Dropout(dropout, parallel=True, ctx=ctx)
        # if True: keep queries, keys and values, and nothing else until the output projection
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
        """Refuse norms whose gradients would miss what the heads of other tp ranks contribute."""
        norms = [module for norm in (self.q_norm, self.k_norm) if norm for module in norm.modules()]
        for norm in norms:
            specs = norm.specs.values() if isinstance(norm, ShardedModule) else ()
            if self.ctx.tp_size > 1 and any(spec.shard is None for spec in specs):
                raise UserError(
                    "queries and keys differ between tp ranks: make q_norm and k_norm with "
                    "parallel=True"
                )

    def _normalised(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return q, k and v, one after the other, the first two through their norms."""
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
        """Attend with q, k and v, one after the other: [batch, sequence, this rank's features of
        them] -> [batch, sequence, this rank's features]."""
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
        """Return softmax(q k^T * scale + mask) v, over all ranks that have a part of the
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
                "under context parallelism a rank has a part of the sequence, and an attention "
                "mask must say what it sees of all: make it by megazoo.models.masks.mask_of"
            )
        kernel = partial(self._attend_here, dropout=dropout)
        return attend_across_ranks(kernel, q, k, v, mask, ctx, keep=bool(self.recompute))

    def _within_window(self, mask, q, k) -> torch.Tensor | Packed | MaskPerChunk | None:
        """Return the mask with all that is beyond the window hidden, too; a mask for queries that
        are the last of more keys, if there is none.

        The kernel of a Packed mask hides it. A cache gives no keys to a single query that are
        beyond.
        """
        queries, keys = q.shape[2], k.shape[2]
        window = self.window or keys
        if mask is None and 1 < queries < keys and self.ctx.cp_size == 1:
            return window_mask(queries, keys, window, q.device)
        if self.window is None or isinstance(mask, Packed):
            return mask
        if isinstance(mask, MaskPerChunk):
            raise UserError(
                f"a mask of chunks does not hide what is beyond a window of {self.window}: make it "
                "by megazoo.models.masks.mask_of"
            )
        if keys <= window or self.ctx.cp_size > 1:  # which makes masks of the chunks
            return mask
        seen = window_mask(queries, keys, window, q.device)
        if mask is None:
            return seen
        if mask.dtype == torch.bool:
            return mask & seen
        return mask.masked_fill(~seen, HIDDEN)

    def _attend_here(self, q, k, v, mask, dropout: float = 0.0) -> torch.Tensor:
        """Return softmax(q k^T * scale + mask) v, of keys that are all on this rank."""
        if isinstance(mask, Packed):
            return self._attend_in_documents(q, k, v, mask)
        if isinstance(mask, Shifted):
            y = self._scaled_dot_product(q.flip(2), k, v, mask.of_flipped(), dropout)
            return y.flip(2)
        return self._scaled_dot_product(q, k, v, mask, dropout)

    def takes_packed(self, dtype: torch.dtype) -> bool:
        """Return whether the mask may be Packed: only in half precision, without dropout or soft
        cap, for heads of a multiple of 8 features, 256 at most, and on GPUs not older than Ampere.
        """
        size, device = self.qkv.head_size, self.qkv.weight.device
        if self.soft_cap is not None or self.dropout.active:
            return False
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return False
        return dtype in HALF and size % 8 == 0 and size <= 256

    @untraced
    def _attend_in_documents(self, q, k, v, packed: Packed) -> torch.Tensor:
        """Return softmax(q k^T * scale) v of each document by itself, causal."""
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
        if mask is not None:  # torch's fast kernels refuse masks of three dimensions
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
            # one query may look at all in the cache
            is_causal=mask is None and q.shape[2] == k.shape[2],
            dropout_p=dropout,
            scale=self.scale,
            enable_gqa=k.shape[1] < q.shape[1],
        )

    def _one_query(self, q, k, v, mask: torch.Tensor | None, dropout: float) -> torch.Tensor:
        """Return softmax(q k^T * scale + mask) v of one query a head: those of a group, which look
        at the same keys, are to the kernel several queries of one head. k and v stay as they are.
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
        """Return how many query heads a tp rank has, or the one that has the fewest."""
        shard, tp = self.qkv.shard, self.ctx.tp_size
        return min(shard.local_sizes(tp, rank)[0] for rank in range(tp)) // self.qkv.head_size

    @property
    def heads(self) -> range:
        """The global indices of this rank's query heads."""
        cut = self.qkv.shard.cuts(self.ctx.tp_size, self.ctx.tp_rank)[0]
        size = self.qkv.head_size
        return range(cut.global_start // size, (cut.global_start + cut.length) // size)
