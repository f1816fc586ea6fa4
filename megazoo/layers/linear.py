"""Linear layers cut over the tensor-parallel ranks: Megatron-LM (Shoeybi et al. 2019)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megazoo.errors import UserError
from megazoo.layers.int8 import Int8Product, rounded_to_int8
from megazoo.layers.layer import Layer
from megazoo.layers.matmul import linear
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.regions import (
    gather_from_tensor_parallel,
    scatter_to_tensor_parallel,
)

# In place: only this layer has its output.
from megazoo.parallel.regions import leave_tensor_parallel_in_place as leave_tensor_parallel
from megazoo.parallel.shard import ParameterSpec, Shard, units_for


class _ParallelLinear(Layer):
    """The base of both linear layers, which chooses what multiplies.

    lora: the product of a weight with adapters, from megazoo.lora. int8: the product of a rounded
    weight: see round_to_int8. Otherwise it is `linear`.
    """

    multiplied = ("weight",)
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, ctx: ParallelContext | None):
        super().__init__(ctx)
        self.lora: Any = None
        self.int8: Int8Product | None = None

    def extra_repr(self) -> str:
        spec, bias = self.specs["weight"], "bias" in self.specs
        text = f"in_features={spec.shape[1]}, out_features={spec.shape[0]}, bias={bias}"
        return ", ".join(filter(None, [text, spec.shard_text(self.ctx.place)]))

    @property
    def shard(self) -> Shard:
        """The cut of the weight."""
        shard = self.specs["weight"].shard
        assert shard
        return shard

    @property
    def product(self) -> Callable[..., torch.Tensor]:
        """What multiplies: product(x, weight, bias, entering=, recompute=, queue=), as `linear`
        does."""
        return self.lora or self.int8 or linear


class ColumnParallelLinear(_ParallelLinear):
    """y = x W^T + b with the outputs cut over tp: each rank computes its own columns of y.

    Args:
        in_features: size of x's last dimension, the same on every rank.
        out_features: outputs in all; a tuple for fused projections, e.g. (gate, up): every rank
            then holds its share of each part, one after the other.
        bias: add a bias, cut like the outputs.
        units: of each part, the features of a group (a head) that is never cut. tp need not divide
            the groups' number; where tp is a multiple of it, each group is replicated. By default
            features are cut evenly where tp divides them, else as `units_for` says.
        part_names: what the parts are called, where adapters are added to some of them.
        gather_output: return all outputs on every rank instead of this rank's (one part only).
        std: standard deviation of the initial weights. ctx: parallel context; by default the
            ambient one.

    Shapes: [..., in_features] -> [..., this rank's outputs], or [..., out_features] if gathered;
    `sizes` are those of every rank. Under sequence parallelism x is this rank's part of the
    sequence, [..., sequence / tp, in_features], and y has all of it.
    Errors: UserError if a part has fewer outputs than there are ranks, or units that don't fill it
    would have to be replicated.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        bias: bool = True,
        *,
        units: tuple[int, ...] = (),
        part_names: tuple[str, ...] = (),
        gather_output: bool = False,
        std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        parts = out_features if isinstance(out_features, tuple) else (out_features,)
        shard = Shard(0, parts, units or units_for(parts, self.ctx.tp_size))
        shard.check(self.ctx.tp_size, "outputs")
        self.sizes = shard.sizes_of_ranks(self.ctx.tp_size)
        if gather_output and len(parts) > 1:
            raise UserError(
                f"gather_output would interleave the {len(parts)} fused parts: "
                "gather them one by one"
            )
        self.part_names, self.gather_output = part_names, gather_output
        self.add_parameter("weight", ParameterSpec((sum(parts), in_features), shard, std=std))
        if bias:
            self.add_parameter("bias", ParameterSpec((sum(parts),), shard))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.synced_parameter("weight"), self.synced_parameter("bias")
        y = self.product(x, weight, bias, entering=self.ctx, queue=self.weight_queue)
        return gather_from_tensor_parallel(y, self.ctx, self.sizes) if self.gather_output else y


class RowParallelLinear(_ParallelLinear):
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
        std, ctx: as there.

    Shapes: [..., this rank's inputs] -> [..., out_features]. Under sequence parallelism y is this
    rank's part of the sequence, [..., sequence / tp, out_features].
    Errors: UserError if there are fewer inputs, or groups of them, than ranks, or x would be cut
    here under sequence parallelism.
    """

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
        units = (unit,) if unit else units_for((in_features,), self.ctx.tp_size)
        shard = Shard(1, (in_features,), units)
        shard.check(self.ctx.tp_size, "inputs")
        if unit and any(shard.replicated(self.ctx.tp_size)):
            raise UserError(
                f"{in_features} inputs in units of {unit} can't be cut over tp {self.ctx.tp_size}: "
                f"use tp of at most {in_features // unit}, or copies would be summed twice"
            )
        self.sizes = shard.sizes_of_ranks(self.ctx.tp_size)
        if self.ctx.sequence_parallel and not input_is_parallel:
            raise UserError(
                "under sequence parallelism a row-parallel layer needs an input that is cut by "
                "features"
            )
        self.input_is_parallel = input_is_parallel
        self.add_parameter("weight", ParameterSpec((out_features, in_features), shard, std=std))
        if bias:
            self.add_parameter("bias", ParameterSpec((out_features,)))
        else:
            self.register_parameter("bias", None)

    def forward(
        self, x: torch.Tensor, recompute: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return y of x, or, if there is a function to `recompute`, of recompute(x): backward runs
        it again, and only x is kept."""
        if not self.input_is_parallel:
            x = scatter_to_tensor_parallel(x, self.ctx, self.sizes)
        alone = self.ctx.tp_size == 1  # there is no sum over ranks that the bias has to wait for
        bias, queue = self.bias if alone else None, self.weight_queue
        y = self.product(x, self.weight, bias, recompute=recompute, queue=queue)
        y = leave_tensor_parallel(y, self.ctx)
        return y if alone or self.bias is None else y + self.synced_parameter("bias")


def round_to_int8(model: nn.Module) -> None:
    """Round the weight of each parallel linear layer in a model to 8 bits, in place, for inference.

    Of a row, int8 = round(weight / scale) with scale = max |weight| / 127, the same in every
    layout. Biases, norms, embeddings and heads stay as they are; all parameters are frozen, and the
    model can't be saved any more. UserError if a layer has adapters.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, _ParallelLinear) and layer.int8 is None
    ]
    if any(layer.lora is not None for layer in layers):
        raise UserError("megazoo.lora.merge(model) first: adapters can't change rounded weights")
    model.requires_grad_(False)
    for layer in layers:
        cut_inputs = layer.ctx.tp_group if isinstance(layer, RowParallelLinear) else None
        weight, scale = rounded_to_int8(layer.weight.detach(), cut_inputs)
        layer.weight, layer.int8 = nn.Parameter(weight, requires_grad=False), Int8Product(scale)


def refuse_rounded(model: nn.Module, what: str) -> None:
    """Raise UserError if weights of a model are rounded to 8 bits. what: can't be done to them."""
    if any(parameter.dtype == torch.int8 for parameter in model.parameters()):
        raise UserError(f"weights that are rounded to 8 bits are not {what}: do that before")
