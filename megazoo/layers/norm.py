"""Normalisation layers."""

import torch
import torch.nn.functional as F
from torch import nn

from megazoo.layers import fused
from megazoo.layers.fused import replaced_by
from megazoo.layers.layer import Layer
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.regions import copy_to_tensor_parallel, reduce_from_tensor_parallel
from megazoo.parallel.shard import ParameterSpec, Shard


class LayerNorm(Layer):
    """Layer normalisation over the last dimension (Ba et al. 2016).

    Args:
        hidden_size: size of the last dimension.
        eps: added to the variance.
        bias: whether there is one.
        parallel: x differs between tp ranks, as heads do: the gradients of weight and bias are then
            summed over them.
        ctx: parallel context; the ambient one by default.

    Shapes: [..., hidden_size] -> [..., hidden_size].
    """

    shown = ("eps",)
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        parallel: bool = False,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        self.eps = eps
        shard = _one_unit(hidden_size) if parallel else None
        self.add_parameter("weight", ParameterSpec((hidden_size,), shard, mean=1.0))
        if bias:
            self.add_parameter("bias", ParameterSpec((hidden_size,), shard))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(
            x,
            self.weight.shape,
            self.synced_parameter("weight"),
            self.synced_parameter("bias"),
            self.eps,
        )


@replaced_by(fused.rms_norm)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight: [..., size] -> the same.

    Normalises in fp32, casts back, and only then multiplies by the weight, as LLaMA does.
    """
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)


class RMSNorm(Layer):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich 2019), with a
    weight and no bias: see rms_norm.

    Args: hidden_size: size of the last dimension; eps: added to the mean square; parallel, ctx: as
    in LayerNorm.
    Shapes: [..., hidden_size] -> [..., hidden_size].
    """

    shown = ("eps",)
    weight: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        parallel: bool = False,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        self.eps = eps
        shard = _one_unit(hidden_size) if parallel else None
        self.add_parameter("weight", ParameterSpec((hidden_size,), shard, mean=1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.synced_parameter("weight"), self.eps)


class HeadwiseLayerNorm(Layer):
    """Layer normalisation over the features of all heads together, which are cut over the tp ranks.

    The moments are those of all ranks' heads: each rank adds its part to them.

    Args:
        hidden_size: features of all heads, over all tp ranks.
        unit: features that stay together, as the projection is cut: see qkv.units_of_heads.
        eps, bias, ctx: as in LayerNorm.

    Shapes: [..., this rank's heads, head_size] -> the same.
    Errors: UserError if the features can't be cut so over the ranks.
    """

    shown = ("eps",)
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        unit: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        self.eps, shard = eps, Shard(0, (hidden_size,), (unit,))
        shard.check(self.ctx.tp_size, "features")
        self.add_parameter("weight", ParameterSpec((hidden_size,), shard, mean=1.0))
        if bias:
            self.add_parameter("bias", ParameterSpec((hidden_size,), shard))
        else:
            self.register_parameter("bias", None)
        # features over all ranks: replicated heads count as often as they are held
        self.counted = sum(shard.sizes_of_ranks(self.ctx.tp_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.flatten(-2).float()
        centred = wide - self._mean(wide)
        y = centred * torch.rsqrt(self._mean(centred.square()) + self.eps)
        y = y.to(x.dtype) * self.synced_parameter("weight")
        y = y if self.bias is None else y + self.synced_parameter("bias")
        return y.unflatten(-1, x.shape[-2:])

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean over all ranks' features. Every rank uses it, so its gradient is summed
        over them, too."""
        total = reduce_from_tensor_parallel(x.sum(dim=-1, keepdim=True), self.ctx)
        return copy_to_tensor_parallel(total, self.ctx) / self.counted


def _one_unit(size: int) -> Shard:
    """Return the cut of a parameter that every tp rank holds whole and uses for an x of its own:
    its gradient is summed over them."""
    return Shard(0, (size,), (size,))
