"""The base class of layers, and the properties that a layer declares to other parts of megazoo."""

from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from megazoo.parallel.module import ShardedModule

# The attributes that a module may declare, with their types. None: not declared.
TYPES = {
    "recompute": bool,
    "site": str,
    "window": int,
    "score_features": int,
    "context_parallel": bool,
    "kernel_masks": bool,
    "static_cache": bool,
    "auxiliary_losses": tuple,
    "joint_losses": dict,
    "counts_tokens": bool,
    "same_input": bool,
    "token_share": float,
}


class Layer(ShardedModule):
    """The base class of all layers: a ShardedModule that declares its properties.

    A subclass that overrides forward must repeat the class attributes. They describe forward.

    Class attributes:
        context_parallel: the layer is correct when it gets only this context-parallel rank's part
            of the sequence: an attention that communicates across the ranks, or a layer in which
            tokens do not interact. With cp 2 or more, every layer of a model must declare it on
            itself or on its attention.
        kernel_masks: an attention accepts all masks that `mask_of` returns, in addition to boolean
            ones. A block must pass its mask to its attention only.
        static_cache: an attention works with a StaticKVCache, whose slots do not move. If it also
            accepts Packed, it accepts Paged: see megazoo.layers.masks.
        auxiliary_losses: names of the losses that the layer attaches: see `attach_loss`.
        counts_tokens: the layer counts tokens in training: see
            `megazoo.layers.auxiliary.count_tokens`.
        same_input: all modules inside have the input of the layer, and none has the output of
            another. `flops_per_token` uses it to find those that pass a gradient on.

    Attributes:
        score_features: number of features over which queries and keys are multiplied, over all tp
            ranks. `flops_per_token` counts them, and ignores the modules inside. 0 if the cost of
            the attention does not grow with the sequence.
        joint_losses: of the losses that the layer attaches with `attach_joint_loss`, the names and
            the sizes of their vectors.
        window: number of tokens that a query attends to, including itself; None: all tokens up to
            itself. `flops_per_token` uses it, and a KVCache stores this number of tokens.
        recompute: False; `model.recompute("selective")` sets it to True. The layer then saves less
            for backward, and computes the rest again. None: the layer has no such choice.
        token_share: the part of all tokens that the `multiplied` weights multiply, for
            `flops_per_token`: below 1 for stacked experts.
        site: the global name of a dropout, from which its mask is drawn. The model sets it if it is
            not None.

    A module that is not a Layer may have attributes with these names and types, on itself or on its
    class. Those of a class are read once.
    """

    context_parallel: bool = False
    kernel_masks: bool = False
    static_cache: bool = False
    auxiliary_losses: tuple[str, ...] = ()
    joint_losses: Mapping[str, int] = MappingProxyType({})
    counts_tokens: bool = False
    same_input: bool = False
    score_features: int | None = None
    window: int | None = None
    recompute: bool | None = None
    token_share: float = 1.0
    site: str | None = None

    def takes_packed(self, dtype: torch.dtype) -> bool:
        """Return whether an attention with kernel_masks accepts a Packed mask, for activations of
        this dtype."""
        return False


def declared(module: nn.Module, name: str) -> Any:
    """Return what a module declares under a name of TYPES, or the default of Layer."""
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
    """Yield the outermost modules within a module, or the module itself, that are attentions or
    declare context_parallel."""
    if declared(module, "context_parallel") or declared(module, "score_features"):
        yield module
    else:
        for child in module.children():
            yield from attentions_of(child)
