"""Linear layers cut over the tensor-parallel ranks (Megatron-LM, Shoeybi et al. 2019)."""

import torch
import torch.nn.functional as F
from einops import rearrange

from megazoo.errors import UserError
from megazoo.parallel import collectives
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import ParameterSpec, Shard, ShardedModule


class ColumnParallelLinear(ShardedModule):
    """y = x W^T + b with the outputs cut over tp: each rank computes its own columns of y.

    Args:
        in_features: size of x's last dimension, the same on every rank.
        out_features: outputs in all; a tuple for fused projections, e.g. (gate, up): every rank then holds its share
            of each part, one after the other.
        bias: add a bias, cut like the outputs.
        unit: cut between groups of this many features (a head), whose number tp need not divide; 1 must be divided.
        gather_output: return all outputs on every rank instead of this rank's (one part only).
        std: standard deviation of the initial weights.
        ctx: parallel context; the ambient one by default.

    Shapes: [..., in_features] -> [..., out_features / tp], or [..., out_features] if gathered.
    Errors: UserError if tp does not divide a part.
    Source: Megatron-LM, section 3: the input's gradient is summed over tp.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        bias: bool = True,
        *,
        unit: int = 1,
        gather_output: bool = False,
        std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        parts = out_features if isinstance(out_features, tuple) else (out_features,)
        shard = Shard(0, parts, unit)
        for part in parts:
            _check_cut("outputs", part, unit, self.ctx)
        if gather_output and len(parts) > 1:
            raise UserError(f"gather_output would interleave the {len(parts)} fused parts: gather them one by one")
        self.gather_output = gather_output
        self.sizes = [sum(shard.local_sizes(self.ctx.tp_size, rank)) for rank in range(self.ctx.tp_size)]
        self.add_parameter("weight", ParameterSpec((sum(parts), in_features), shard, std=std))
        if bias:
            self.add_parameter("bias", ParameterSpec((sum(parts),), shard))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(collectives.copy_to_tensor_parallel(x, self.ctx), self.weight, self.bias)
        return collectives.gather_from_tensor_parallel(y, self.ctx, self.sizes) if self.gather_output else y


class RowParallelLinear(ShardedModule):
    """y = x W^T + b with the inputs cut over tp: each rank computes a partial y, and the sum is returned on all.

    Args:
        in_features: inputs in all, over the tp ranks together.
        out_features: size of y's last dimension, the same on every rank.
        bias: add a bias, once, after the sum; every rank holds all of it.
        unit: cut between groups of this many inputs (a head), whose number tp need not divide; 1 must be divided.
        input_is_parallel: x is this rank's part already (what a ColumnParallelLinear returns); else x is cut here.
        std: standard deviation of the initial weights.
        ctx: parallel context; the ambient one by default.

    Shapes: [..., in_features / tp] -> [..., out_features].
    Errors: UserError if tp does not divide in_features.
    Source: Megatron-LM, section 3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        unit: int = 1,
        input_is_parallel: bool = True,
        std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        _check_cut("inputs", in_features, unit, self.ctx)
        self.input_is_parallel = input_is_parallel
        shard = Shard(1, (in_features,), unit)
        self.sizes = [sum(shard.local_sizes(self.ctx.tp_size, rank)) for rank in range(self.ctx.tp_size)]
        self.add_parameter("weight", ParameterSpec((out_features, in_features), shard, std=std))
        if bias:
            self.add_parameter("bias", ParameterSpec((out_features,)))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.input_is_parallel:
            x = collectives.scatter_to_tensor_parallel(x, self.ctx, self.sizes)
        y = collectives.reduce_from_tensor_parallel(F.linear(x, self.weight), self.ctx)
        return y if self.bias is None else y + self.bias


class QKVParallelLinear(ColumnParallelLinear):
    """The fused projection to queries, keys and values: each rank computes those of its own heads.

    Args:
        hidden_size: size of x's last dimension.
        heads: query heads; kv_heads: key and value heads (the same number by default).
        head_size: features of one head; hidden_size / heads by default.
        bias, std, ctx: as in ColumnParallelLinear.

    Shapes: [batch, sequence, hidden] -> q [batch, this rank's heads, sequence, head_size], and k and v likewise.
    The weight is [q; k; v] along its rows, the heads of each in order; every rank holds its heads of all three. Where
    tp doesn't divide the heads, the first ranks hold one more.
    Errors: UserError if tp exceeds the heads, or the heads don't divide hidden_size.
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
        self.head_size = head_size or hidden_size // heads
        parts = tuple(n * self.head_size for n in (heads, kv_heads, kv_heads))
        super().__init__(hidden_size, parts, bias, unit=self.head_size, std=std, ctx=ctx)
        self.local_parts = self.specs["weight"].shard.local_sizes(self.ctx.tp_size, self.ctx.tp_rank)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = super().forward(x).split(self.local_parts, dim=-1)
        q, k, v = (rearrange(part, "b s (heads size) -> b heads s size", size=self.head_size) for part in parts)
        return q, k, v


def _check_cut(what: str, count: int, unit: int, ctx: ParallelContext) -> None:
    if count % unit:
        raise UserError(f"{count} {what} are not whole units of {unit}")
    if count // unit < ctx.tp_size or (unit == 1 and count % ctx.tp_size):
        raise UserError(f"{count // unit} {what if unit == 1 else 'heads'} don't divide over tp {ctx.tp_size}")
