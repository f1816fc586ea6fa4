"""Matrix products in float8: for training see `multiply_in_float8`, for inference
`round_to_float8`."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megazoo.errors import UserError
from megazoo.layers.experts import StackedLinear
from megazoo.layers.int8 import RoundedProduct
from megazoo.layers.linear import ParallelLinear, round_weights
from megazoo.layers.product import PLAIN, Product
from megazoo.parallel.axes import Axis
from megazoo.parallel.collectives import all_reduce, all_reduce_over
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.cpu.products import linear_for
from megazoo.parallel.shard import ParameterSpec
from megazoo.torch_internals import float8_product, takes_float8_product

Recipe = Literal["tensorwise", "rowwise"]
Axes = Sequence[Axis]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 1e-12  # largest value of a factor, so that no scale is infinite


class Scaled(NamedTuple):
    """A matrix in float8: values / scale. scale: fp32 [1, 1], or one per row, [rows, 1]."""

    values: torch.Tensor
    scale: torch.Tensor


class Float8Product(nn.Module, Product):
    """The products of factors that are rounded to float8.

    A factor is multiplied by a scale, which brings its largest value to the largest number of
    float8, and rounded. Same as the recipes of torchao 0.18:

    - tensorwise: one scale per factor. Gradients of outputs are float8_e5m2; weights and inputs are
      float8_e4m3fn.
    - rowwise: a scale, which is a power of two, for each row of the first factor and each column of
      the second one. All are float8_e4m3fn.

    In a stack of matrices, each matrix and its rows have their scales. The largest value is reduced
    over the ranks of tp and cp that share the factor. The replicas of dp have different scales, as
    micro-batches do; so have ranks that experts are sharded over.

    CUDA devices with float8 multiply it if all sizes are multiples of 16. Elsewhere the rounded
    factors are multiplied in fp32. Those of stacks are multiplied in the dtype of the activations.

    Args:
        recipe: how factors are scaled.
        ctx: parallel context of the layer.
        spec: how its weight is sharded: [outputs, inputs], or a stack of such matrices.

    Raises:
        UserError: The recipe is unknown.
    """

    def __init__(self, recipe: Recipe, ctx: ParallelContext, spec: ParameterSpec):
        super().__init__()
        if recipe not in get_args(Recipe):
            known = " or ".join(get_args(Recipe))
            raise UserError(f"unknown recipe {recipe!r} of float8: use {known}")
        self.recipe, self.ctx, self.spec = recipe, ctx, spec
        self.stacked, self.rowwise = len(spec.shape) > 2, recipe == "rowwise"
        self.of_gradients = E4M3 if self.rowwise else E5M2

    def extra_repr(self) -> str:
        return self.recipe

    def _axes(self, dim: int) -> Axes:
        """Return the axes that shard a dimension of the weight."""
        shards = [shard for shard in self.spec.shards_in(self.ctx) if shard.dim == dim]
        return [self.ctx.tp if s.axis == "tp" else self.ctx.folded[s.axis] for s in shards]

    @property
    def outputs(self) -> Axes:
        """The axes that shard the outputs."""
        return self._axes(len(self.spec.shape) - 2)

    @property
    def inputs(self) -> Axes:
        """The axes that shard the inputs."""
        return self._axes(len(self.spec.shape) - 1)

    @property
    def rows(self) -> Axes:
        """The axes that shard the rows. Ranks that experts are sharded over exchange rows."""
        return [] if self.stacked and self._axes(0) else [self.ctx.cp]

    def output(self, x, weight, bias=None, counts=None):
        if counts is not None:
            x = self._rounded_rows(x, counts, self.inputs)
            return PLAIN.output(x, self._rounded_stack(weight, 2, self.inputs), counts=counts)
        a = self._scaled(x.flatten(0, -2), self.rows, self.inputs)
        b = self._scaled(weight, self.outputs, self.inputs)
        y = self._multiplied(a, b, x.dtype, fast=True)
        y = y if bias is None else y.add_(bias)
        # new memory, which is not a view for autograd
        return y.view(*x.shape[:-1], len(weight)).detach()

    def gradient(self, grad):
        if self.rowwise or self.stacked:  # each product has other scales
            return grad
        return self._scaled(grad, self.rows, self.outputs, self.of_gradients), grad.dtype

    def input_gradient(self, grad, weight, counts=None, total=None):
        if counts is not None:
            grad = self._rounded_rows(grad, counts, self.outputs, self.of_gradients)
            return PLAIN.input_gradient(grad, self._rounded_stack(weight, 1, self.outputs), counts)
        if self.rowwise:
            grad = self._scaled(grad, self.rows, self.outputs), grad.dtype
        a, dtype = grad
        b = self._scaled(weight.t(), self.inputs, self.outputs)
        found = self._multiplied(a, b, dtype)
        return found if total is None else total.add_(found)

    def weight_gradient(self, grad, x, counts=None):
        if counts is not None:
            grad = self._rounded_columns(grad, counts, self.outputs, self.of_gradients)
            return PLAIN.weight_gradient(
                grad, self._rounded_columns(x, counts, self.inputs), counts
            )
        if self.rowwise:
            a, dtype = self._scaled(grad.t(), self.outputs, self.rows), grad.dtype
        else:
            (values, scale), dtype = grad
            a = Scaled(values.t().contiguous(), scale)
        return self._multiplied(a, self._scaled(x.t(), self.inputs, self.rows), dtype)

    def _scaled(
        self, matrix: torch.Tensor, others: Axes, summed: Axes, dtype: torch.dtype = E4M3
    ) -> Scaled:
        """Round a matrix [others, summed] to float8. A product is summed over the last dimension.
        others, summed: axes that shard the dimensions."""
        if self.rowwise:
            largest, axes = _largest(matrix, (1,)), summed
        else:
            largest, axes = _largest(matrix, (0, 1)), [*others, *summed]
        scale = self._scale(largest, axes, dtype)
        return Scaled(_rounded(matrix, scale, dtype).contiguous(), scale)

    def _scale(self, largest: torch.Tensor, axes: Axes, dtype: torch.dtype) -> torch.Tensor:
        """Return the scale for the largest values on this rank, which are reduced over axes."""
        all_reduce_over(largest, axes, dist.ReduceOp.MAX)
        # as torchao: a quotient in fp32 may differ after compilation
        scale = (torch.finfo(dtype).max / largest.double().clamp(min=SMALLEST)).float()
        return _power_of_two(scale) if self.rowwise else scale

    @staticmethod
    def _multiplied(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
        """Return a b^T. fast: whether tensor cores may accumulate with fewer bits, as torchao does
        in forward."""
        if takes_float8_product(a.values, b.values, dtype, is_rowwise=len(a.scale) > 1):
            return float8_product(a.values, b.values, a.scale, b.scale, dtype, fast)
        x, weight = a.values.float(), b.values.float()
        return (linear_for(x, weight)(x, weight) / (a.scale * b.scale.t())).to(dtype)

    def _rounded_stack(self, weight: torch.Tensor, summed: int, axes: Axes) -> torch.Tensor:
        """Return a stack of matrices whose values are those of float8. summed: the dimension that
        products are summed over. axes: that shard it."""
        axes = axes if self.rowwise else [*self.outputs, *self.inputs]
        largest = _largest(weight, (summed,) if self.rowwise else (1, 2))
        return _there_and_back(weight, self._scale(largest, axes, E4M3), E4M3)

    def _rounded_rows(
        self, x: torch.Tensor, counts: torch.Tensor, axes: Axes, dtype: torch.dtype = E4M3
    ) -> torch.Tensor:
        """Return rows of a stack, [rows, features], with values of float8. A product is summed over
        the features, which the axes shard."""
        if self.rowwise:
            return _there_and_back(x, self._scale(_largest(x, (1,)), axes, dtype), dtype)
        return self._rounded_groups(x, _largest(x, (1,)), counts, [*axes, *self.rows], dtype)

    def _rounded_columns(
        self, x: torch.Tensor, counts: torch.Tensor, axes: Axes, dtype: torch.dtype = E4M3
    ) -> torch.Tensor:
        """As `_rounded_rows`, for a product that is summed over the rows of each group."""
        if self.rowwise:
            return self._rounded_groups(x, x.detach().abs().float(), counts, self.rows, dtype)
        return self._rounded_rows(x, counts, axes, dtype)

    def _rounded_groups(
        self, x: torch.Tensor, largest: torch.Tensor, counts: torch.Tensor, axes: Axes, dtype
    ) -> torch.Tensor:
        """Return rows of a stack with values of float8, whose scales are those of the largest
        values in each group. largest: of each row, [rows, columns]."""
        group = torch.arange(len(counts), device=x.device).repeat_interleave(counts)
        groups = largest.new_zeros(len(counts), largest.shape[1])
        groups.scatter_reduce_(0, group[:, None].expand_as(largest), largest, "amax")
        return _there_and_back(x, self._scale(groups, axes, dtype)[group], dtype)


def _power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Round scales down to powers of two."""
    return torch.exp2(scale.log2().floor())


def _largest(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return the largest absolute values over some dimensions, which get the size 1, in fp32."""
    if not x.numel():
        sizes = (1 if dim in dims else size for dim, size in enumerate(x.shape))
        return torch.zeros(*sizes, device=x.device)
    return x.detach().abs().amax(dims, keepdim=True).float()


def _rounded(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max  # casts of torch 2.11 do not saturate
    return (x.detach().float() * scale).clamp_(-limit, limit).to(dtype)


def _there_and_back(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x with values of float8, in its dtype."""
    return (_rounded(x, scale, dtype).float() / scale).to(x.dtype)


def multiply_in_float8(model: nn.Module, recipe: Recipe = "tensorwise") -> None:
    """Let the parallel linear layers and experts of a model multiply in float8: see Float8Product.

    Heads, embeddings, norms, routers, attention scores and adapters are computed as before. Weights
    are stored as before. Add adapters before or after; their base is multiplied in float8.

    Args:
        model: the model, or any module with such layers.
        recipe: "tensorwise" or "rowwise": see Float8Product.

    Raises:
        UserError: A layer has another product, or the recipe is unknown.

    Example:
        model = megazoo.from_config("llama-tiny", ctx, dtype=torch.bfloat16)
        multiply_in_float8(model)
    """
    layers: list[Any] = [
        layer for layer in model.modules() if isinstance(layer, (ParallelLinear, StackedLinear))
    ]
    if any(layer.product is not PLAIN for layer in layers):
        raise UserError(
            "weights with a custom product can't be multiplied in float8: set layer.product to "
            "megazoo.layers.product.PLAIN first"
        )
    for layer in layers:
        layer.product = Float8Product(recipe, layer.ctx, layer.specs["weight"])


class Float8WeightProduct(RoundedProduct):
    """The product of a weight that is rounded to float8_e4m3fn, and stored as uint8.

    CUDA devices with float8 also round the rows of the input, and multiply float8.
    """

    def widened(self, weight):
        return weight.view(E4M3).float() * self.scale[:, None]

    def output(self, x, weight, bias=None, counts=None):
        rows = x.flatten(0, -2)
        padded = F.pad(rows, (0, 0, 0, -len(rows) % 16))  # a kernel needs multiples of 16
        values = weight.view(E4M3)
        if not takes_float8_product(padded, values, x.dtype, is_rowwise=True):
            return super().output(x, weight, bias)
        scale = _power_of_two(torch.finfo(E4M3).max / _largest(padded, (1,)).clamp(min=SMALLEST))
        scales = scale, self.scale[:, None].reciprocal()
        y = float8_product(_rounded(padded, scale, E4M3), values, *scales, x.dtype, fast=True)
        y = y[: len(rows)].unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias


def rounded_to_float8(
    weight: torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [outputs, inputs] in float8_e4m3fn, as uint8, and the scale of each output,
    fp32 [outputs]: max |weight| / 448 over the full row.

    The inputs may be sharded over the ranks of `group`.
    """
    largest = _largest(weight, (1,))
    all_reduce(largest, group, dist.ReduceOp.MAX)
    scale = torch.finfo(E4M3).max / largest.clamp(min=SMALLEST)
    return _rounded(weight, scale, E4M3).view(torch.uint8), scale.reciprocal()[:, 0]


def round_to_float8(model: nn.Module) -> None:
    """Round the weights of all parallel linear layers of a model to float8, for inference.

    As `round_to_int8`, with scale = max |weight| / 448.

    Args:
        model: the model, or any module with parallel linear layers.

    Raises:
        UserError: A layer has adapters (merge them first), or another product.

    Example:
        round_to_float8(model)
        model.generate(ids)
    """
    round_weights(model, rounded_to_float8, Float8WeightProduct)
