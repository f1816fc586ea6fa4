"""Linear layers cut over the tensor-parallel ranks (Megatron-LM, Shoeybi et al. 2019)."""

from collections.abc import Callable
from functools import partial

import torch

from megazoo.errors import UserError
from megazoo.layers.fused import linear
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.deferred import WeightQueue
from megazoo.parallel.module import ShardedModule
from megazoo.parallel.regions import (
    enter_tensor_parallel,
    gather_from_tensor_parallel,
    leave_tensor_parallel,
    scatter_to_tensor_parallel,
)
from megazoo.parallel.shard import ParameterSpec, Shard, units_for


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: ParallelContext,
    queue: WeightQueue | None = None,
) -> torch.Tensor:
    """This rank's columns of y: x [..., in_features] (its part of the sequence, under sequence
    parallelism), weight and bias cut over tp. queue: where the weight's gradient is to wait."""
    if not ctx.sequence_parallel:
        return linear(enter_tensor_parallel(x, ctx), weight, bias, queue=queue)
    # Keep this rank's part of x for backward and gather it again there.
    gather = partial(enter_tensor_parallel, ctx=ctx)
    return linear(x, weight, bias, of=gather, queue=queue)


class ColumnParallelLinear(ShardedModule):
    """y = x W^T + b with the outputs cut over tp: each rank computes its own columns of y.

    Args:
        in_features: size of x's last dimension, the same on every rank.
        out_features: outputs in all; a tuple for fused projections, e.g. (gate, up): every rank
            then holds its share of each part, one after the other.
        bias: add a bias, cut like the outputs.
        units: of each part, the features of a group (a head) that is never cut. tp need not divide
            the groups' number; where tp is a multiple of it, each group is replicated. By default
            features are cut evenly where tp divides them, else as `units_for` says. A
            RowParallelLinear of as many inputs is cut alike.
        gather_output: return all outputs on every rank instead of this rank's (one part only).
        std: standard deviation of the initial weights.
        ctx: parallel context; the ambient one by default.

    Shapes: [..., in_features] -> [..., this rank's outputs], or [..., out_features] if gathered;
    `sizes` are those of every rank. Under sequence parallelism x is this rank's part of the
    sequence, [..., sequence / tp, in_features], and y has all of it.
    Errors: UserError if a part has fewer outputs than there are ranks, or units that don't fill it
    are replicated.
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
            raise UserError(
                f"gather_output would interleave the {len(parts)} fused parts: gather them one by one"
            )
        self.gather_output = gather_output
        self.sizes = [
            sum(shard.local_sizes(self.ctx.tp_size, rank)) for rank in range(self.ctx.tp_size)
        ]
        self.add_parameter("weight", ParameterSpec((sum(parts), in_features), shard, std=std))
        if bias:
            self.add_parameter("bias", ParameterSpec((sum(parts),), shard))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = column_parallel_linear(
            x, self.replicated("weight"), self.replicated("bias"), self.ctx, self.weight_queue
        )
        return gather_from_tensor_parallel(y, self.ctx, self.sizes) if self.gather_output else y


class RowParallelLinear(ShardedModule):
    """y = x W^T + b with the inputs cut over tp: each rank computes a partial y, and the sum is
    returned on all.

    Args:
        in_features: inputs in all, over the tp ranks together.
        out_features: size of y's last dimension, the same on every rank.
        bias: add a bias, once, after the sum; every rank holds all of it.
        unit: cut between groups of this many inputs (a head), whose number tp need not divide; by
            default the inputs are cut as the outputs of a ColumnParallelLinear are.
        input_is_parallel: x is this rank's part already (what a ColumnParallelLinear returns); else
            x is cut here.
        std: standard deviation of the initial weights.
        ctx: parallel context; the ambient one by default.

    Shapes: [..., this rank's inputs] -> [..., out_features]. Under sequence parallelism y is this
    rank's part of the sequence, [..., sequence / tp, out_features], and x must be cut by features
    already.
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
        units = (
            units_for((in_features,), self.ctx.tp_size)
            if unit is None
            else (unit,)
            if unit > 1
            else ()
        )
        shard = Shard(1, (in_features,), units)
        _check_cut("inputs", shard, self.ctx)
        if self.ctx.sequence_parallel and not input_is_parallel:
            raise UserError(
                "under sequence parallelism a row-parallel layer needs an input that is cut by features"
            )
        self.input_is_parallel = input_is_parallel
        self.sizes = [
            sum(shard.local_sizes(self.ctx.tp_size, rank)) for rank in range(self.ctx.tp_size)
        ]
        self.add_parameter("weight", ParameterSpec((out_features, in_features), shard, std=std))
        if bias:
            self.add_parameter("bias", ParameterSpec((out_features,)))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.input_is_parallel:
            x = scatter_to_tensor_parallel(x, self.ctx, self.sizes)
        return self._finish(linear(x, self.weight, self._own_bias, queue=self.weight_queue))

    def of_recomputed(
        self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        """self(function(x)), keeping x and not function(x) for backward."""
        return self._finish(
            linear(x, self.weight, self._own_bias, of=function, queue=self.weight_queue)
        )

    @property
    def _own_bias(self) -> torch.Tensor | None:
        """The bias, where there is no sum over ranks that it has to wait for."""
        return self.bias if self.ctx.tp_size == 1 else None

    def _finish(self, part: torch.Tensor) -> torch.Tensor:
        if self.ctx.tp_size == 1:
            return part
        y = leave_tensor_parallel(part, self.ctx)
        return y if self.bias is None else y + self.replicated("bias")


def _check_cut(what: str, shard: Shard, ctx: ParallelContext) -> None:
    for part, unit, copied in zip(
        shard.parts, shard.all_units, shard.replicated(ctx.tp_size), strict=True
    ):
        if copied and unit == 1:
            raise UserError(
                f"{part} {what} can't be cut over tp {ctx.tp_size}: use tp of at most {part}"
            )
        if copied and (part % unit or not part or ctx.tp_size % (part // unit)):
            raise UserError(
                f"{part} {what} in units of {unit} can't be cut over tp {ctx.tp_size}, nor copied evenly"
            )
