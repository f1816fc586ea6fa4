"""Linear layers cut over the tensor-parallel ranks (Megatron-LM, Shoeybi et al. 2019)."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from megazoo.errors import UserError
from megazoo.layers.rotary import rotate, turn
from megazoo.parallel import collectives
from megazoo.parallel.context import ParallelContext, current_context
from megazoo.parallel.linear import WeightQueue, linear
from megazoo.parallel.shard import ParameterSpec, Shard, ShardedModule, units_for


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: ParallelContext,
    queue: WeightQueue | None = None,
) -> torch.Tensor:
    """This rank's columns of y: x [..., in_features] (its part of the sequence, under sequence parallelism), weight and
    bias cut over tp. queue: where the weight's gradient is to wait."""
    if not ctx.sequence_parallel:
        return linear(collectives.enter_tensor_parallel(x, ctx), weight, bias, queue=queue)
    # Keep this rank's part of x for backward and gather it again there.
    gather = partial(collectives.enter_tensor_parallel, ctx=ctx)
    return linear(x, weight, bias, of=gather, queue=queue)


class ColumnParallelLinear(ShardedModule):
    """y = x W^T + b with the outputs cut over tp: each rank computes its own columns of y.

    Args:
        in_features: size of x's last dimension, the same on every rank.
        out_features: outputs in all; a tuple for fused projections, e.g. (gate, up): every rank then holds its share
            of each part, one after the other.
        bias: add a bias, cut like the outputs.
        units: of each part, the features of a group (a head) that is never cut. tp need not divide the groups' number;
            where tp is a multiple of it, each group is replicated. By default features are cut evenly where tp divides
            them, else as `units_for` says. A RowParallelLinear of as many inputs is cut alike.
        gather_output: return all outputs on every rank instead of this rank's (one part only).
        std: standard deviation of the initial weights.
        ctx: parallel context; the ambient one by default.

    Shapes: [..., in_features] -> [..., this rank's outputs], or [..., out_features] if gathered; `sizes` are those of
    every rank. Under sequence parallelism x is this rank's part of the sequence, [..., sequence / tp, in_features], and
    y has all of it.
    Errors: UserError if a part has fewer outputs than there are ranks, or units that don't fill it are replicated.
    Source: Megatron-LM, section 3: the input's gradient is summed over tp.
    """

    multiplied = ("weight",)

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        bias: bool = True,
        *,
        units: tuple[int, ...] = (),
        gather_output: bool = False,
        std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        parts = out_features if isinstance(out_features, tuple) else (out_features,)
        shard = Shard(0, parts, units or units_for(parts, self.ctx.tp_size))
        _check_cut("outputs", shard, self.ctx)
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
        y = column_parallel_linear(x, self.whole("weight"), self.whole("bias"), self.ctx, self.weight_queue)
        return collectives.gather_from_tensor_parallel(y, self.ctx, self.sizes) if self.gather_output else y


class RowParallelLinear(ShardedModule):
    """y = x W^T + b with the inputs cut over tp: each rank computes a partial y, and the sum is returned on all.

    Args:
        in_features: inputs in all, over the tp ranks together.
        out_features: size of y's last dimension, the same on every rank.
        bias: add a bias, once, after the sum; every rank holds all of it.
        unit: cut between groups of this many inputs (a head), whose number tp need not divide; by default the inputs
            are cut as the outputs of a ColumnParallelLinear are.
        input_is_parallel: x is this rank's part already (what a ColumnParallelLinear returns); else x is cut here.
        std: standard deviation of the initial weights.
        ctx: parallel context; the ambient one by default.

    Shapes: [..., this rank's inputs] -> [..., out_features]. Under sequence parallelism y is this rank's part of the
    sequence, [..., sequence / tp, out_features], and x must be cut by features already.
    Errors: UserError if there are fewer inputs than ranks.
    Source: Megatron-LM, section 3.
    """

    multiplied = ("weight",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        unit: int | None = None,
        input_is_parallel: bool = True,
        std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        units = units_for((in_features,), self.ctx.tp_size) if unit is None else (unit,) if unit > 1 else ()
        shard = Shard(1, (in_features,), units)
        _check_cut("inputs", shard, self.ctx)
        if self.ctx.sequence_parallel and not input_is_parallel:
            raise UserError("under sequence parallelism a row-parallel layer needs an input that is cut by features")
        self.input_is_parallel = input_is_parallel
        self.sizes = [sum(shard.local_sizes(self.ctx.tp_size, rank)) for rank in range(self.ctx.tp_size)]
        self.add_parameter("weight", ParameterSpec((out_features, in_features), shard, std=std))
        if bias:
            self.add_parameter("bias", ParameterSpec((out_features,)))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.input_is_parallel:
            x = collectives.scatter_to_tensor_parallel(x, self.ctx, self.sizes)
        return self._finish(linear(x, self.weight, self._own_bias, queue=self.weight_queue))

    def of_recomputed(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """self(function(x)), keeping x and not function(x) for backward."""
        return self._finish(linear(x, self.weight, self._own_bias, of=function, queue=self.weight_queue))

    @property
    def _own_bias(self) -> torch.Tensor | None:
        """The bias, where there is no sum over ranks that it has to wait for."""
        return self.bias if self.ctx.tp_size == 1 else None

    def _finish(self, part: torch.Tensor) -> torch.Tensor:
        if self.ctx.tp_size == 1:
            return part
        y = collectives.leave_tensor_parallel(part, self.ctx)
        return y if self.bias is None else y + self.whole("bias")


class QKVParallelLinear(ColumnParallelLinear):
    """The fused projection to queries, keys and values: each rank computes those of its own heads.

    Args:
        hidden_size: size of x's last dimension.
        heads: query heads; kv_heads: key and value heads (the same number by default).
        head_size: features of one head; hidden_size / heads by default.
        bias, std, ctx: as in ColumnParallelLinear.

    Shapes: [batch, sequence, hidden] -> q [batch, this rank's heads, sequence, head_size], and k and v likewise.
    The weight is [q; k; v] along its rows, the heads of each in order; every rank holds its heads of all three, KV
    heads together with the queries that use them. Where tp doesn't divide the KV heads, the first ranks hold one more;
    where tp is a multiple of them, each is replicated over tp / kv_heads ranks, over which its gradient is summed.
    Errors: UserError if neither holds, or the heads don't divide hidden_size.

    score_features: the features of all query heads, over all ranks, for `flops_per_token` to count.
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
        size, tp = self.head_size, (ctx or current_context()).tp_size
        if heads % kv_heads or (tp > kv_heads and (tp % kv_heads or heads % tp)):
            raise UserError(f"{heads} heads with {kv_heads} key-value heads can't be cut over tp {tp}")
        queries = heads // kv_heads if tp <= kv_heads else 1  # that stay with their KV head
        self.score_features = heads * size
        parts, self.units = tuple(n * size for n in (heads, kv_heads, kv_heads)), (queries * size, size, size)
        super().__init__(hidden_size, parts, bias, units=self.units, std=std, ctx=ctx)
        self.local_parts = self.specs["weight"].shard.local_sizes(self.ctx.tp_size, self.ctx.tp_rank)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """q, k and v, one after the other: [batch, sequence, this rank's features of all three]."""
        return super().forward(x)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = split_heads(self.project(x), self.local_parts, self.head_size)
        return q, k, v


def split_heads(
    qkv: torch.Tensor,
    parts: Sequence[int],
    head_size: int,
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take [batch, sequence, parts' sum] apart into q, k and v, each [batch, its heads, sequence, head_size].

    rotary: cos and sin of Rotary, which turn the queries and keys.
    """
    if not torch.compiler.is_compiling():
        return _SplitHeads.apply(qkv, parts, head_size, *(rotary or (None, None)))
    q, k, v = _heads(qkv, parts, head_size)
    return (rotate(q, *rotary), rotate(k, *rotary), v) if rotary else (q, k, v)


class _SplitHeads(torch.autograd.Function):
    """Gradients go into one tensor, where autograd would make three and join them; what is turned is kept once."""

    @staticmethod
    def forward(ctx, qkv, parts, head_size, cos, sin):
        ctx.parts, ctx.head_size = parts, head_size
        ctx.save_for_backward(cos, sin)
        if cos is None:
            return _heads(qkv, parts, head_size)
        turned = torch.empty_like(qkv)
        _SplitHeads._fill(ctx, turned, _heads(qkv, parts, head_size), cos, sin)
        return _heads(turned, parts, head_size)

    @staticmethod
    def backward(ctx, *grads):
        cos, sin = ctx.saved_tensors
        batch, _, sequence, _ = grads[0].shape
        grad = grads[0].new_empty(batch, sequence, sum(ctx.parts))
        _SplitHeads._fill(ctx, grad, grads, cos, None if sin is None else -sin)
        return grad, None, None, None, None

    @staticmethod
    def _fill(ctx, qkv, heads, cos, sin) -> None:
        """Write q, k and v into qkv, q and k turned."""
        if cos is not None and cos.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        for name, part, out in zip("qkv", heads, _heads(qkv, ctx.parts, ctx.head_size), strict=True):
            if cos is None or name == "v":
                out.copy_(part)
            else:
                turn(part, cos, sin, out)


def _heads(qkv: torch.Tensor, parts: Sequence[int], head_size: int) -> tuple[torch.Tensor, ...]:
    return tuple(part.unflatten(-1, (-1, head_size)).transpose(1, 2) for part in qkv.split(parts, dim=-1))


def _check_cut(what: str, shard: Shard, ctx: ParallelContext) -> None:
    for part, unit, copied in zip(shard.parts, shard.all_units, shard.replicated(ctx.tp_size), strict=True):
        if copied and unit == 1:
            raise UserError(f"{part} {what} can't be cut over tp {ctx.tp_size}: use tp of at most {part}")
        if copied and (part % unit or not part or ctx.tp_size % (part // unit)):
            raise UserError(f"{part} {what} in units of {unit} can't be cut over tp {ctx.tp_size}, nor copied evenly")
