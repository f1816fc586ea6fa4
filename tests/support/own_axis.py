"""GPT-2 with an axis of a user's own in every layer: a stack of matrices, which the axis shares
out, and tp cuts each of them. Experts are cut so."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import megazoo
from megazoo.models import gpt2
from megazoo.parallel import ParameterSpec, Shard
from megazoo.parallel.collectives import all_gather_parts, reduce_scatter_parts
from megazoo.parallel.module import ShardedModule
from megazoo.parallel.regions import enter_tensor_parallel, leave_tensor_parallel
from tests.support.training import NO_DROPOUT, TINY


@dataclass(frozen=True)
class ToyConfig(gpt2.GPT2Config):
    matrices: int = 4
    features: int = 6


class Gathered(torch.autograd.Function):
    """Every rank's part along an axis, and in backward the sum of what all ranks give to one's."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        return all_gather_parts(part, group).flatten(0, 1)

    @staticmethod
    def backward(ctx, grad):
        parts = grad.contiguous().view(ctx.group.size(), -1, *grad.shape[1:])
        return reduce_scatter_parts(parts, ctx.group), None


class Stack(ShardedModule):
    """x + the sum over the matrices W of gelu(x W^T) W."""

    def __init__(self, matrices, features, size):
        super().__init__()
        shards = (Shard(0, (matrices,), axis="toy"), Shard(1, (features,)))
        self.add_parameter("weight", ParameterSpec((matrices, features, size), shards, std=0.2))

    def forward(self, x):
        weight = self.weight
        if "toy" in self.ctx.folded and self.ctx.axis("toy").size > 1:
            weight = Gathered.apply(weight, self.ctx.axis("toy").group)
        entered, weight = enter_tensor_parallel(x, self.ctx), weight.flatten(0, 1)
        return x + leave_tensor_parallel(F.gelu(entered @ weight.T) @ weight, self.ctx)


class Block(gpt2.Block):
    def __init__(self, c, index):
        super().__init__(c, index)
        self.stack = Stack(c.matrices, c.features, c.hidden_size)

    def forward(self, x, *arguments):
        return self.stack(super().forward(x, *arguments))


@megazoo.register("toy")
class Toy(gpt2.GPT2):
    Config, Block = ToyConfig, Block
    presets = {"toy-tiny": ToyConfig(**{**TINY, **NO_DROPOUT, "layers": 3})}
