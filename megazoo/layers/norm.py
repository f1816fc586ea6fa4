"""Normalisation layers. Their parameters are the same on every tensor-parallel rank."""

import torch
import torch.nn.functional as F

from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import ParameterSpec, ShardedModule


class LayerNorm(ShardedModule):
    """Layer normalisation over the last dimension (Ba et al. 2016), with weight and bias.

    Args: hidden_size: size of the last dimension; eps: added to the variance; ctx: parallel context.
    Shapes: [..., hidden_size] -> [..., hidden_size].
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, *, ctx: ParallelContext | None = None):
        super().__init__(ctx)
        self.eps = eps
        self.add_parameter("weight", ParameterSpec((hidden_size,), mean=1.0))
        self.add_parameter("bias", ParameterSpec((hidden_size,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(ShardedModule):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich 2019), with a weight and no bias.

    Normalises in fp32, casts back, and only then multiplies by the weight, as LLaMA does.

    Args: hidden_size: size of the last dimension; eps: added to the mean square; ctx: parallel context.
    Shapes: [..., hidden_size] -> [..., hidden_size].
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, ctx: ParallelContext | None = None):
        super().__init__(ctx)
        self.eps = eps
        self.add_parameter("weight", ParameterSpec((hidden_size,), mean=1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normalised.to(x.dtype)
