"""Linear layers that are sharded over the tensor-parallel ranks, as in Megatron-LM (Shoeybi et al.
2019)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megazoo.errors import UserError
from megazoo.layers.int8 import Int8Product, RoundedProduct, rounded_to_int8
from megazoo.layers.layer import Layer
from megazoo.layers.matmul import Inputs, Recompute, linear
from megazoo.layers.product import PLAIN, Product
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import ROUNDED
from megazoo.parallel.regions import (
    gather_from_tensor_parallel,
    scatter_to_tensor_parallel,
)

# In place: only this layer has its output.
from megazoo.parallel.regions import leave_tensor_parallel_in_place as leave_tensor_parallel
from megazoo.parallel.shard import ParameterSpec, Shard, units_for


class ParallelLinear(Layer):
    """Base class of both linear layers.

    product: multiplies; PLAIN, an Int8Product (see round_to_int8), or another Product. lora:
    multiplies with adapters, from megazoo.lora.
    """

    multiplied = ("weight",)
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, ctx: ParallelContext | None):
        super().__init__(ctx)
        self.lora: Any = None
        self.product: Product = PLAIN

    def extra_repr(self) -> str:
        spec, bias = self.specs["weight"], "bias" in self.specs
        text = f"in_features={spec.shape[1]}, out_features={spec.shape[0]}, bias={bias}"
        return ", ".join(filter(None, [text, spec.shard_text(self.ctx.place)]))

    @property
    def shard(self) -> Shard:
        """How the weight is sharded."""
        shard = self.specs["weight"].shard
        assert shard
        return shard

    def multiply(self, x: Inputs, bias: torch.Tensor | None, **how: Any) -> torch.Tensor:
        """Return x W^T + b. how: entering and recompute, as in `linear`."""
        how |= {"product": self.product, "queue": self.weight_queue}
        return (self.lora or linear)(x, self.use("weight"), bias, **how)


class ColumnParallelLinear(ParallelLinear):
    """Compute y = x W^T + b with the output features sharded over tp.

    The weight of this rank is [this rank's outputs, in_features], and its bias [this rank's
    outputs]. `sizes` lists the number of outputs of every tp rank.

    Args:
        in_features: size of the last dimension of x, the same on every rank.
        out_features: total output features over all tp ranks. A tuple for fused projections, e.g.
            (gate, up): every rank then holds its shard of each part, one after the other.
        bias: whether to add a bias, sharded like the outputs.
        units: per part, the number of features in a group (a head) that is never split. tp need not
            divide the number of groups. If tp is a multiple of it, each group is replicated. By
            default features are split evenly if tp divides them, otherwise as in `units_for`.
        part_names: names of the parts, for adapters on some of them.
        gather_output: whether to return all outputs on every rank instead of this rank's (only for
            one part).
        std: standard deviation of the initial weights.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        [..., in_features] -> [..., this rank's outputs], or [..., out_features] with gather_output.
        Under sequence parallelism x is this rank's part of the sequence, [..., sequence / tp,
        in_features], and y has the full sequence.

    Raises:
        UserError: A part has fewer outputs than there are ranks; or units that do not fill the part
            would have to be replicated; or gather_output is set for several parts.

    Example:
        with ctx:
            up, down = ColumnParallelLinear(64, 256), RowParallelLinear(256, 64)
        y = down(up(x).relu())  # [..., 64], the same on every tp rank
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
                f"gather_output=True would interleave the {len(parts)} fused parts: gather them "
                "one by one"
            )
        self.part_names, self.gather_output = part_names, gather_output
        self.add_parameter("weight", ParameterSpec((sum(parts), in_features), shard, std=std))
        if bias:
            self.add_parameter("bias", ParameterSpec((sum(parts),), shard))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs for x, or all of them with gather_output (shapes: see the
        class)."""
        y = self.multiply(x, self.use("bias"), entering=self.ctx)
        return gather_from_tensor_parallel(y, self.ctx, self.sizes) if self.gather_output else y


class RowParallelLinear(ParallelLinear):
    """Compute y = x W^T + b with the input features sharded over tp.

    Each rank computes a partial y. Their sum is returned on all ranks. The weight of this rank is
    [out_features, this rank's inputs]; the bias, [out_features], is replicated. `sizes` lists the
    number of inputs of every tp rank.

    Args:
        in_features: total input features over all tp ranks.
        out_features: size of the last dimension of y, the same on every rank.
        bias: whether to add a bias. It is added once, after the sum.
        unit: number of features in a group (a head) that is never split; tp need not divide the
            number of groups. By default the inputs are split like the outputs of a
            ColumnParallelLinear.
        input_is_parallel: whether x is already this rank's shard, as returned by a
            ColumnParallelLinear. Otherwise the layer shards x.
        std: standard deviation of the initial weights.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        [..., this rank's inputs] -> [..., out_features]. Under sequence parallelism y is this
        rank's part of the sequence, [..., sequence / tp, out_features].

    Raises:
        UserError: There are fewer inputs, or groups of inputs, than ranks; or input_is_parallel is
            False under sequence parallelism.
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
                f"{in_features} inputs in units of {unit} can't be split over tp "
                f"{self.ctx.tp_size}: use tp of at most {in_features // unit}"
            )
        self.sizes = shard.sizes_of_ranks(self.ctx.tp_size)
        if self.ctx.sequence_parallel and not input_is_parallel:
            raise UserError(
                "under sequence parallelism, RowParallelLinear needs an input that is sharded by "
                "features: use input_is_parallel=True"
            )
        self.input_is_parallel = input_is_parallel
        self.add_parameter("weight", ParameterSpec((out_features, in_features), shard, std=std))
        if bias:
            self.add_parameter("bias", ParameterSpec((out_features,)))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Inputs, recompute: Recompute | None = None) -> torch.Tensor:
        """Return y for x.

        Args:
            x: this rank's inputs (shapes: see the class), or a tuple of the inputs of recompute.
            recompute: a function that is applied to x first: recompute(*x) for a tuple. Backward
                runs it again, so only x is saved.
        """
        if not self.input_is_parallel:
            assert isinstance(x, torch.Tensor)  # recompute gets parallel inputs
            x = scatter_to_tensor_parallel(x, self.ctx, self.sizes)
        alone = self.ctx.tp_size == 1  # without a sum over ranks, the product can add the bias
        bias = self.use("bias")
        y = self.multiply(x, bias if alone else None, recompute=recompute)
        y = leave_tensor_parallel(y, self.ctx)
        return y if alone or bias is None else y + bias


def round_to_int8(model: nn.Module) -> None:
    """Round the weights of all parallel linear layers of a model to 8 bits, in place, for
    inference.

    For each row, int8 = round(weight / scale) with scale = max |weight| / 127, the same in every
    parallel layout. Biases, norms, embeddings and heads are not rounded. All parameters are frozen,
    and the model can't be saved after that.

    Args:
        model: the model, or any module with parallel linear layers.

    Raises:
        UserError: A layer has adapters (merge them first), or another product.

    Example:
        round_to_int8(model)
        model.generate(ids)
    """
    round_weights(model, rounded_to_int8, Int8Product)


def round_weights(
    model: nn.Module,
    rounded: Callable[[torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]],
    product_of: Callable[[torch.Tensor], RoundedProduct],
) -> None:
    """Round the weights of all parallel linear layers of a model, in place.

    rounded: returns a weight in 8 bits, and the scales of its rows. Its inputs may be sharded over
    a group, the second argument. product_of: returns the product for the scales.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, ParallelLinear) and not isinstance(layer.product, RoundedProduct)
    ]
    if any(layer.storage is not None for layer in layers):
        raise UserError("weights can't be rounded with zero 3: load the model with another zero")
    if any(layer.product is not PLAIN for layer in layers):
        raise UserError(
            "weights with a custom product can't be rounded: set layer.product to "
            "megazoo.layers.product.PLAIN first"
        )
    if any(layer.lora is not None for layer in layers):
        raise UserError(
            "weights with adapters can't be rounded: call megazoo.lora.merge(model) first"
        )
    model.requires_grad_(False)
    for layer in layers:
        cut_inputs = layer.ctx.tp_group if isinstance(layer, RowParallelLinear) else None
        weight, scale = rounded(layer.weight.detach(), cut_inputs)
        layer.weight, layer.product = nn.Parameter(weight, requires_grad=False), product_of(scale)
    forget_parameters(model)


def forget_parameters(model: nn.Module) -> None:
    """Free the parameters that a model had before: its engine refers to those that it reduced."""
    engine = getattr(model, "engine", None)
    if hasattr(engine, "parameters_changed"):
        engine.parameters_changed()


def refuse_rounded(model: nn.Module, what: str) -> None:
    """Raise UserError if weights of a model are rounded to 8 bits, or packed. what: the operation,
    e.g. "saved"."""
    if any(parameter.dtype in ROUNDED for parameter in model.parameters()):
        raise UserError(
            f"weights that are rounded to 8 bits can't be {what}: do that before rounding"
        )
    refuse_packed(model, what)


def refuse_packed(model: nn.Module, what: str) -> None:
    """Raise UserError if weights of a model are in oneDNN's layout. what: the operation."""
    if any(parameter.is_mkldnn for parameter in model.parameters()):
        raise UserError(f"weights in oneDNN's layout can't be {what}: do that before pack_weights")
