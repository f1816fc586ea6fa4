"""A custom storage: parameters rest as ranges of their elements over the replicas.

Each use in forward gathers the values, which stay in memory until backward.

The ranges are shards over an axis "ranges", which is folded into dp.
"""

import torch
from torch import nn

from megazoo.parallel import ParameterSpec, Shard
from megazoo.parallel.axes import Axis
from megazoo.parallel.collectives import all_gather_parts, reduce_scatter_parts
from megazoo.parallel.module import ShardedModule

AXIS = "ranges"


class Ranges:
    """The storage of a module. shapes: of its parameters, by name."""

    def __init__(self, axis: Axis, shapes: dict[str, torch.Size]):
        self.axis, self.shapes = axis, shapes

    def use(self, module: ShardedModule, name: str) -> torch.Tensor | None:
        rests = getattr(module, name)
        return None if rests is None else _Gathered.apply(rests, self.axis, self.shapes[name])


class _Gathered(torch.autograd.Function):
    """A parameter, and in backward this rank's range of the sum of its gradients."""

    @staticmethod
    def forward(ctx, own, axis, shape):
        ctx.axis = axis
        return all_gather_parts(own, axis.group).flatten()[: shape.numel()].view(shape)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_parts(_parts(grad, ctx.axis), ctx.axis.group), None, None


def _parts(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the elements of a tensor, with zeros at the end: [ranks of the axis, elements]."""
    flat = tensor.contiguous().flatten()
    padded = nn.functional.pad(flat, (0, -flat.numel() % axis.size))
    return padded.view(axis.size, -1)


def rest_as_ranges(model: nn.Module):
    """Let all parameters of a model rest as ranges, before its first batch; return the model.

    The model's context has an axis "ranges" that is folded into dp. tp is 1, no parameter is tied,
    and no router has a bias. Checkpoints and Muon would see the flat ranges.
    """
    for module in model.modules():
        if not isinstance(module, ShardedModule):
            continue
        axis = module.ctx.axis(AXIS)
        shapes = {name: getattr(module, name).shape for name in module.specs}
        for name in module.specs:
            parts = _parts(getattr(module, name).detach(), axis)
            module.register_parameter(name, nn.Parameter(parts[axis.rank].clone()))
            shard = Shard(0, (parts.numel(),), axis=AXIS)
            module.specs[name] = ParameterSpec((parts.numel(),), shard)
        module.storage = Ranges(axis, shapes)
    return model


def gathered_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gathered values of all parameters, by name."""
    with torch.no_grad():
        return {
            f"{prefix}.{name}": module.use(name).clone()
            for prefix, module in model.named_modules()
            if isinstance(module, ShardedModule)
            for name in module.specs
        }
