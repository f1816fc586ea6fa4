"""Normalisation layers."""

import torch
import torch.nn.functional as F

from megazoo.layers.fused import _RMSNorm
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import ShardedModule
from megazoo.parallel.regions import copy_to_tensor_parallel, reduce_from_tensor_parallel
from megazoo.parallel.shard import ParameterSpec, Shard


class LayerNorm(ShardedModule):
    """Layer normalisation over the last dimension (Ba et al. 2016).

    Args: hidden_size: size of the last dimension; eps: added to the variance; bias: whether there
    is one; ctx: parallel context.
    Shapes: [..., hidden_size] -> [..., hidden_size].
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        self.eps = eps
        self.add_parameter("weight", ParameterSpec((hidden_size,), mean=1.0))
        if bias:
            self.add_parameter("bias", ParameterSpec((hidden_size,)))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(
            x, self.weight.shape, self.replicated("weight"), self.replicated("bias"), self.eps
        )


class HeadwiseLayerNorm(ShardedModule):
    """Layer normalisation over all heads together, of a projection whose heads are cut over the tp
    ranks.

    The moments are those of the whole projection: each rank adds its part to them.

    Args: hidden_size: features of all heads; unit: those that stay together, as the projection is
    cut; eps, bias, ctx: as in LayerNorm.
    Shapes: [..., this rank's features] -> the same.
    """

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
        self.add_parameter("weight", ParameterSpec((hidden_size,), shard, mean=1.0))
        if bias:
            self.add_parameter("bias", ParameterSpec((hidden_size,), shard))
        else:
            self.register_parameter("bias", None)
        held = sum(
            sum(shard.local_sizes(self.ctx.tp_size, rank)) for rank in range(self.ctx.tp_size)
        )
        # features over all ranks: replicated heads count as often as they are held
        self.counted = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        centred = wide - self._mean(wide)
        y = centred * torch.rsqrt(self._mean(centred.square()) + self.eps)
        y = y.to(x.dtype) * self.replicated("weight")
        return y if self.bias is None else y + self.replicated("bias")

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over all ranks' features. Every rank uses it, so its gradient is summed over
        them, too."""
        total = reduce_from_tensor_parallel(x.sum(dim=-1, keepdim=True), self.ctx)
        return copy_to_tensor_parallel(total, self.ctx) / self.counted


class RMSNorm(ShardedModule):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich 2019), with a
    weight and no bias.

    Normalises in fp32, casts back, and only then multiplies by the weight, as LLaMA does.

    Args: hidden_size: size of the last dimension; eps: added to the mean square; ctx: parallel
    context.
    Shapes: [..., hidden_size] -> [..., hidden_size].
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, ctx: ParallelContext | None = None):
        super().__init__(ctx)
        self.eps = eps
        self.add_parameter("weight", ParameterSpec((hidden_size,), mean=1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RMSNorm.apply(x, self.replicated("weight"), self.eps)
