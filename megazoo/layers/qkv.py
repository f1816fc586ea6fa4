"""The fused projection to queries, keys and values, whose heads are cut over the tensor-parallel
ranks."""

from collections.abc import Sequence

import torch
from einops import rearrange

from megazoo.errors import UserError
from megazoo.layers import fused
from megazoo.layers.fused import CosAndSin, replaced_by
from megazoo.layers.linear import ColumnParallelLinear
from megazoo.layers.rotary import rotate
from megazoo.parallel.context import ParallelContext, current_context


def units_of_heads(
    heads: int, kv_heads: int, head_size: int, ctx: ParallelContext | None = None
) -> tuple[int, int, int]:
    """Return the features of q, k and v that stay together when heads are cut over tp.

    Queries stay with the key-value head that they use, unless tp exceeds the number of those: then
    each is replicated over tp / kv_heads ranks. ctx: the ambient one by default.
    Errors: UserError if the heads can't be cut so.
    """
    tp = (ctx or current_context()).tp_size
    if heads % kv_heads or (tp > kv_heads and (tp % kv_heads or heads % tp)):
        raise UserError(f"{heads} heads with {kv_heads} key-value heads can't be cut over tp {tp}")
    queries = heads // kv_heads if tp <= kv_heads else 1
    return queries * head_size, head_size, head_size


class QKVParallelLinear(ColumnParallelLinear):
    """The fused projection to queries, keys and values: each rank computes those of its own heads.

    Args:
        hidden_size: size of x's last dimension.
        heads: query heads.
        kv_heads: key and value heads; as many by default.
        head_size: features of one head; hidden_size / heads by default.
        bias, std, ctx: as in ColumnParallelLinear.

    Shapes: [batch, sequence, hidden] -> q [batch, this rank's heads, sequence, head_size], and k
    and v likewise. The weight is [q; k; v] along its rows, the heads of each in order; every rank
    holds its heads of all three, KV heads together with the queries that use them. Where tp doesn't
    divide the KV heads, the first ranks hold one more; where tp is a multiple of them, each is
    replicated over tp / kv_heads ranks, over which its gradient is summed.
    Errors: UserError if neither holds, or the heads don't divide hidden_size.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int | None = None,
        head_size: int | None = None,
        bias: bool = True,
        *,
        std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        kv_heads = kv_heads or heads
        if head_size is None and hidden_size % heads:
            raise UserError(f"{heads} heads don't divide a hidden size of {hidden_size}")
        size = head_size or hidden_size // heads
        units = units_of_heads(heads, kv_heads, size, ctx)
        parts = (heads * size, kv_heads * size, kv_heads * size)
        names = ("q", "k", "v")
        super().__init__(hidden_size, parts, bias, units=units, part_names=names, std=std, ctx=ctx)
        self.head_size, self.units, self.score_features = size, units, heads * size
        self.local_parts = self.shard.local_sizes(self.ctx.tp_size, self.ctx.tp_rank)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return q, k and v, one after the other: [batch, sequence, this rank's features of all
        three]."""
        return super().forward(x)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return split_heads(self.project(x), self.local_parts, self.head_size)


@replaced_by(fused.split_heads)
def split_heads(
    qkv: torch.Tensor, parts: Sequence[int], head_size: int, rotary: CosAndSin | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split qkv, [batch, sequence, parts' sum], into q, k and v, and turn q and k by rotary's cos
    and sin: each [batch, its heads, sequence, head_size]."""
    q, k, v = (
        rearrange(part, "batch seq (heads size) -> batch heads seq size", size=head_size)
        for part in qkv.split(parts, dim=-1)
    )
    return (rotate(q, *rotary), rotate(k, *rotary), v) if rotary else (q, k, v)
