"""The base class of layers, and what a layer declares to other parts of megazoo."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

from megazoo.parallel.module import ShardedModule

# What any module may declare, and of which type; None stands for no answer.
TYPES = {
    "recompute": bool,
    "site": str,
    "window": int,
    "score_features": int,
    "context_parallel": bool,
    "kernel_masks": bool,
    "static_cache": bool,
    "auxiliary_losses": tuple,
    "same_input": bool,
}


class Layer(ShardedModule):
    """The base class of all layers: a ShardedModule that declares what the rest asks of it.

    Class attributes that describe the forward. A subclass that overrides forward repeats them:

    context_parallel: the layer is right with a context-parallel rank's part of a sequence: an
        attention that looks across the ranks, or a layer in which no token looks at another. A
        model with a layer that declares it nowhere is not built at cp 2 or more.
    kernel_masks: an attention takes, besides a boolean mask, all that `mask_of` makes; a block
        gives its mask to its attention, and uses it for nothing else.
    static_cache: an attention works with a StaticKVCache, whose places do not move.
    auxiliary_losses: names of the losses that the layer attaches: see `attach_loss`.
    same_input: the modules within all have the layer's input, none another's output;
        `flops_per_token` asks which of them pass a gradient on.

    Attributes that a layer sets in __init__:

    score_features: features over which queries and keys are multiplied, of all tp ranks together;
        `flops_per_token` counts them, and asks no module inside one that declares it. 0 if the cost
        of an attention doesn't grow with the sequence.
    window: how many tokens a query looks at, itself included; None: all before it.
        `flops_per_token` counts them, and a KVCache keeps so many.
    recompute: False, and set to True by `model.recompute("selective")`: the layer then keeps less
        for backward, and computes the rest again there. None: there is nothing to choose.
    site: the global name of a dropout, by which it draws; the model sets it where it is no None.

    A module that is no Layer may have attributes of these names and types, of itself or of its
    class, which are read once of each class.
    """

    context_parallel: bool = False
    kernel_masks: bool = False
    static_cache: bool = False
    auxiliary_losses: tuple[str, ...] = ()
    same_input: bool = False
    score_features: int | None = None
    window: int | None = None
    recompute: bool | None = None
    site: str | None = None

    def takes_packed(self, dtype: torch.dtype) -> bool:
        """Return whether an attention that takes kernel_masks takes one that is Packed, for
        activations of this dtype."""
        return False


def declared(module: nn.Module, name: str) -> Any:
    """Return what any module declares by a name of TYPES, or Layer's default."""
    value = vars(module).get(name)
    if value is not None and isinstance(value, TYPES[name]):
        return value
    return _declared_by(type(module), name)


@cache
def _declared_by(cls: type, name: str) -> Any:
    """Return what a class declares. Declarations of a base class whose forward is overridden do not
    count."""
    for names in map(vars, cls.__mro__):
        if isinstance(names.get(name), TYPES[name]):
            return names[name]
        if "forward" in names:
            break
    return getattr(Layer, name)


def attentions_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules within a module, or itself, that attend or declare that they are
    right with a part of the sequence."""
    if declared(module, "context_parallel") or declared(module, "score_features"):
        yield module
    else:
        for child in module.children():
            yield from attentions_of(child)
