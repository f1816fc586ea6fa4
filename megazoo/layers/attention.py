"""Causal self-attention with the heads sharded over the tensor-parallel ranks."""

from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import nn

from megazoo.errors import UserError
from megazoo.layers.attend import Attend, Mask
from megazoo.layers.cache import KVCache
from megazoo.layers.fused import CosAndSin
from megazoo.layers.layer import Layer
from megazoo.layers.linear import RowParallelLinear
from megazoo.layers.qkv import QKVParallelLinear, split_heads
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import ShardedModule


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
            kernels of torch (see plain_attention) and does not support a Packed mask.
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
    shown = ("clip_qkv",)

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
        attend = Attend(
            heads,
            self.qkv.head_size,
            kv_heads,
            scale=scale,
            soft_cap=soft_cap,
            window=window,
            dropout=dropout,
            ctx=ctx,
        )
        # before `attend`: masks are drawn from the first name of the module
        self.dropout = attend.dropout
        self.attend = attend
        self.score_features, self.window = attend.score_features, window
        self.clip_qkv = clip_qkv
        self.q_norm, self.k_norm = q_norm, k_norm
        self._check_norms()
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
        mask: Mask = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """Return the attention output, [batch, sequence, hidden].

        Args:
            x: [batch, sequence, hidden]. Under sequence parallelism it is this rank's part of the
                sequence, as in ColumnParallelLinear. Under context parallelism it is this rank's
                part of the sequence, as in SequenceCut.
            seed: seed of the dropout, as in Dropout.
            rotary: cos and sin from Rotary, which rotate queries and keys.
            mask: None: causal; otherwise as in Attend.
            cache: keys and values of the tokens before x; those of x are appended.
        """
        qkv = self.qkv.project(x)
        if self.clip_qkv:
            qkv = qkv.clamp(-self.clip_qkv, self.clip_qkv)
        if self.q_norm is not None or self.k_norm is not None:
            qkv = self._normalised(qkv)
        how = {"seed": seed, "mask": mask, "cache": cache, "keep": bool(self.recompute)}
        attend = partial(self._attend, rotary=rotary, **how)
        if self.recompute:
            return self.output(qkv, recompute=attend)
        return self.output(attend(qkv))

    def takes_packed(self, dtype: torch.dtype) -> bool:
        """Return whether the mask may be Packed: see Attend."""
        return self.attend.takes_packed(dtype)

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

    def _attend(self, qkv: torch.Tensor, rotary: CosAndSin | None, **how: Any) -> torch.Tensor:
        """Attend with concatenated q, k and v: [batch, sequence, this rank's features of all three]
        -> [batch, sequence, this rank's features]. how: further arguments of Attend."""
        q, k, v = split_heads(qkv, self.qkv.local_parts, self.qkv.head_size, rotary)
        return self.attend(q, k, v, **how)

    @property
    def heads(self) -> range:
        """The global indices of the query heads of this rank."""
        cut = self.qkv.shard.cuts(self.ctx.tp_size, self.ctx.tp_rank)[0]
        size = self.qkv.head_size
        return range(cut.global_start // size, (cut.global_start + cut.length) // size)
