"""The fused projection to queries, keys and values, sharded by heads over the tensor-parallel
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
    """Return the numbers of features of q, k and v that stay together when heads are split over tp.

    Query heads stay with the key-value head that they use. If tp exceeds the number of key-value
    heads, each of these is replicated on tp / kv_heads ranks.

    Args:
        heads: query heads.
        kv_heads: key and value heads.
        head_size: features per head.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Raises:
        UserError: The heads can't be split over tp.
    """
    tp = (ctx or current_context()).tp_size
    if heads % kv_heads or (tp > kv_heads and (tp % kv_heads or heads % tp)):
        raise UserError(
            f"{heads} heads with {kv_heads} key-value heads can't be split over tp {tp}"
        )
    queries = heads // kv_heads if tp <= kv_heads else 1
    return queries * head_size, head_size, head_size


class QKVParallelLinear(ColumnParallelLinear):
    """Project x to queries, keys and values in one product; each rank computes those of its heads.

    The weight is [q; k; v] along its rows, with the heads of each in order. Every rank holds its
    heads of all three, and KV heads together with the queries that use them. If tp does not divide
    the KV heads, the first ranks hold one more. If tp is a multiple of them, each is replicated on
    tp / kv_heads ranks, over which its gradient is summed.

    Args:
        hidden_size: size of the last dimension of x.
        heads: query heads over all tp ranks.
        kv_heads: key and value heads over all tp ranks; default: heads.
        head_size: features per head; default: hidden_size / heads.
        bias: whether to add a bias.
        std: standard deviation of the initial weights.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        [batch, sequence, hidden] -> q [batch, this rank's query heads, sequence, head_size], and k
        and v [batch, this rank's key-value heads, sequence, head_size].

    Raises:
        UserError: The heads can't be split over tp, or they do not divide hidden_size and head_size
            is not given.
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
            raise UserError(f"a hidden size of {hidden_size} is not a multiple of {heads} heads")
        size = head_size or hidden_size // heads
        units = units_of_heads(heads, kv_heads, size, ctx)
        parts = (heads * size, kv_heads * size, kv_heads * size)
        names = ("q", "k", "v")
        super().__init__(hidden_size, parts, bias, units=units, part_names=names, std=std, ctx=ctx)
        self.head_size, self.units, self.score_features = size, units, heads * size
        self.local_parts = self.shard.local_sizes(self.ctx.tp_size, self.ctx.tp_rank)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return q, k and v, concatenated: [batch, sequence, this rank's features of all three]."""
        return super().forward(x)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of x (shapes: see the class)."""
        return split_heads(self.project(x), self.local_parts, self.head_size)


@replaced_by(fused.split_heads)
def split_heads(
    qkv: torch.Tensor, parts: Sequence[int], head_size: int, rotary: CosAndSin | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split qkv [batch, sequence, sum of parts] into q, k and v, and rotate q and k if rotary has
    cos and sin: each [batch, its heads, sequence, head_size]."""
    q, k, v = (
        rearrange(part, "batch seq (heads size) -> batch heads seq size", size=head_size)
        for part in qkv.split(parts, dim=-1)
    )
    return (rotate(q, *rotary), rotate(k, *rotary), v) if rotary else (q, k, v)
