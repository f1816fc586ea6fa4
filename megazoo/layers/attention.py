"""Causal self-attention, its heads cut over the tensor-parallel ranks."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from megazoo.layers.dropout import Dropout
from megazoo.layers.linear import QKVParallelLinear, RowParallelLinear
from megazoo.layers.rotary import rotate
from megazoo.parallel.context import ParallelContext


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention: fused QKV, scaled dot product, output projection.

    Args:
        hidden_size, heads, kv_heads, head_size: over all tp ranks; cut as in QKVParallelLinear.
        dropout: probability on the attention weights.
        bias: biases on both projections.
        std, output_std: standard deviations of the initial weights of the two projections.
        ctx: parallel context; the ambient one by default.

    Shapes: x [batch, sequence, hidden] -> [batch, sequence, hidden]. seed: for the dropout, as in Dropout. rotary: cos
    and sin of Rotary, which turn the queries and keys.
    Source: Vaswani et al. 2017; grouped queries: Ainslie et al. 2023; the cut by heads: Shoeybi et al. 2019.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int | None = None,
        head_size: int | None = None,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        std: float = 0.02,
        output_std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__()
        self.qkv = QKVParallelLinear(hidden_size, heads, kv_heads, head_size, bias, std=std, ctx=ctx)
        self.dropout = Dropout(dropout, parallel=True, ctx=ctx)
        inputs, unit = heads * self.qkv.head_size, self.qkv.units[0]
        self.output = RowParallelLinear(inputs, hidden_size, bias, unit=unit, std=output_std, ctx=ctx)

    def forward(
        self, x: torch.Tensor, seed: int | None = None, rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        q, k, v = self.qkv(x)  # each [batch, this rank's heads, sequence, head size]
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        arguments = {"is_causal": True, "enable_gqa": k.shape[1] < q.shape[1]}
        if self.dropout.active:
            with self.dropout.draw(seed, x.device):
                y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout.probability, **arguments)
        else:
            y = F.scaled_dot_product_attention(q, k, v, **arguments)
        return self.output(rearrange(y, "batch heads sequence size -> batch sequence (heads size)"))
