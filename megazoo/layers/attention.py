"""Causal self-attention, its heads cut over the tensor-parallel ranks."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from megazoo.layers.dropout import Dropout
from megazoo.layers.linear import QKVParallelLinear, RowParallelLinear
from megazoo.parallel.context import ParallelContext


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention: fused QKV, scaled dot product, output projection.

    Args:
        hidden_size, heads: sizes over all tp ranks; where tp doesn't divide the heads, the first ranks have one more.
        dropout: probability on the attention weights.
        bias: biases on both projections.
        std, output_std: standard deviations of the initial weights of the two projections.
        ctx: parallel context; the ambient one by default.

    Shapes: x [batch, sequence, hidden] -> [batch, sequence, hidden]. seed: for the dropout, as in Dropout.
    Source: Vaswani et al. 2017; the cut by heads is Megatron-LM's, Shoeybi et al. 2019.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        std: float = 0.02,
        output_std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__()
        self.qkv = QKVParallelLinear(hidden_size, heads, bias=bias, std=std, ctx=ctx)
        self.dropout = Dropout(dropout, parallel=True, ctx=ctx)
        self.output = RowParallelLinear(
            hidden_size, hidden_size, bias, unit=self.qkv.head_size, std=output_std, ctx=ctx
        )

    def forward(self, x: torch.Tensor, seed: int | None = None) -> torch.Tensor:
        q, k, v = self.qkv(x)  # each [batch, this rank's heads, sequence, head size]
        if self.dropout.active:
            with self.dropout.draw(seed, x.device):
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout.probability)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(rearrange(y, "batch heads sequence size -> batch sequence (heads size)"))
