"""Normalisation layers."""

import torch
import torch.nn.functional as F
from torch import nn

from megazoo.errors import UserError
from megazoo.layers import fused
from megazoo.layers.fused import replaced_by
from megazoo.layers.layer import Layer
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.regions import copy_to_tensor_parallel, reduce_from_tensor_parallel
from megazoo.parallel.shard import ParameterSpec, Shard


class LayerNorm(Layer):
    """Normalise over the last dimension (layer normalisation, Ba et al. 2016).

    Args:
        hidden_size: size of the last dimension.
        eps: added to the variance.
        bias: whether to add a bias.
        parallel: whether x differs between tp ranks, as heads do. The gradients of weight and bias
            are then summed over the tp ranks.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        [..., hidden_size] -> [..., hidden_size].
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
        weight = self.use("weight")
        return F.layer_norm(x, weight.shape, weight, self.use("bias"), self.eps)


@replaced_by(fused.rms_norm)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight: [..., size] -> the same shape.

    The result is normalised in fp32, cast back, and then multiplied by the weight, as in LLaMA.
    """
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)


class RMSNorm(Layer):
    """Normalise by the root mean square over the last dimension (Zhang and Sennrich 2019).

    It has a weight and no bias: see rms_norm.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the mean square.
        parallel: whether x differs between tp ranks, as heads do. The gradient of the weight is
            then summed over the tp ranks.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        [..., hidden_size] -> [..., hidden_size].
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
        return rms_norm(x, self.use("weight"), self.eps)


class HeadwiseLayerNorm(Layer):
    """Normalise over the features of all heads together, which are sharded over the tp ranks.

    Mean and variance are those of the heads of all ranks: they are summed over tp.

    Args:
        hidden_size: features of all heads, over all tp ranks.
        unit: features that stay together, as in the projection: see units_of_heads.
        eps: added to the variance.
        bias: whether to add a bias.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        [..., this rank's heads, head_size] -> the same shape.

    Raises:
        UserError: The features can't be split over the ranks in these units.
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
        # features over all ranks: replicated heads count once per rank that holds them
        self.counted = sum(shard.sizes_of_ranks(self.ctx.tp_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.flatten(-2).float()
        centred = wide - self._mean(wide)
        y = centred * torch.rsqrt(self._mean(centred.square()) + self.eps)
        y = y.to(x.dtype) * self.use("weight")
        bias = self.use("bias")
        y = y if bias is None else y + bias
        return y.unflatten(-1, x.shape[-2:])

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean over the features of all ranks. Every rank uses it, so its gradient is
        also summed over them."""
        total = reduce_from_tensor_parallel(x.sum(dim=-1, keepdim=True), self.ctx)
        return copy_to_tensor_parallel(total, self.ctx) / self.counted


class HeadwiseRMSNorm(HeadwiseLayerNorm):
    """Normalise by the root mean square over the features of all heads together, which are sharded
    over the tp ranks.

    The mean square is that of the heads of all ranks: it is summed over tp. The result is
    multiplied by the weight in fp32. It has a weight and no bias.

    Args:
        hidden_size: features of all heads, over all tp ranks.
        unit: features that stay together, as in the projection: see units_of_heads.
        eps: added to the mean square.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        [..., this rank's heads, head_size] -> the same shape.

    Raises:
        UserError: The features can't be split over the ranks in these units.
    """

    def __init__(
        self, hidden_size: int, unit: int, eps: float = 1e-6, *, ctx: ParallelContext | None = None
    ):
        super().__init__(hidden_size, unit, eps, bias=False, ctx=ctx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.flatten(-2).float()
        normalised = wide * torch.rsqrt(self._mean(wide.square()) + self.eps)
        y = self.use("weight").float() * normalised
        return y.to(x.dtype).unflatten(-1, x.shape[-2:])


class LayerNormPerHead(Layer):
    """Normalise the features of each head separately, with a weight and a bias per head.

    The heads are sharded over the tp ranks. Optimizers apply no weight decay.

    Args:
        heads: heads over all tp ranks.
        head_size: features of a head.
        unit: heads that stay together, as in the projection: see units_of_heads.
        eps: added to the variance.
        bias: whether to add a bias.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        [..., this rank's heads, head_size] -> the same shape.

    Raises:
        UserError: The heads can't be split over the ranks in these units.
    """

    shown = ("eps",)
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        heads: int,
        head_size: int,
        unit: int = 1,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        self.eps, shard, tp = eps, Shard(0, (heads,), (unit,)), self.ctx.tp_size
        if any(shard.replicated(tp)) and (heads % unit or tp % (heads // unit)):
            raise UserError(
                f"{heads} heads in units of {unit} can't be split over tp {tp}, nor replicated "
                "evenly"
            )
        shape = (heads, head_size)
        self.add_parameter("weight", ParameterSpec(shape, shard, mean=1.0, decays=False))
        if bias:
            self.add_parameter("bias", ParameterSpec(shape, shard, decays=False))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps) * self.use("weight")
        bias = self.use("bias")
        return (y if bias is None else y + bias).to(x.dtype)


def _one_unit(size: int) -> Shard:
    """Return the Shard of a parameter that every tp rank holds in full and applies to a different
    x: its gradient is summed over them."""
    return Shard(0, (size,), (size,))
