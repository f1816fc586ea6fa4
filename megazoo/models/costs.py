"""Counts the FLOPs of modules, and the costs by which layers are divided into stages."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from megazoo.layers.layer import declared
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import ShardedModule, without_memory
from megazoo.parallel.random import all_seeded

LONGEST = 4096  # tokens of a typical sequence in training


def stage_costs(family: Any, config: Any) -> tuple[float, float, float]:
    """Return the multiply-adds per token of one layer, on average over the layers, of the
    embedding, and of the head.

    A query attends to half of a sequence of at most LONGEST tokens, or to its window.
    """
    head = (config.num_labels or config.vocab_size) * config.hidden_size
    key = _Key(family, type(config), repr(vars(config)), config)
    return _cost_of_layer(key), 2 * config.hidden_size, head


class _Key(NamedTuple):
    """A config with a hash. Configs of a family are equal if their values are."""

    family: Any
    kind: type
    values: str
    config: Any

    def __hash__(self) -> int:
        return hash(self[:3])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self[:3] == other[:3]


@lru_cache(maxsize=64)
def _cost_of_layer(key: _Key) -> float:
    """Return the mean multiply-adds per token of the layers of a config."""
    config, flops = key.config, 0
    keys = min(config.max_positions, LONGEST) // 2
    with ParallelContext(), without_memory(), all_seeded(0):
        for index in range(config.layers):
            try:
                with torch.device("meta"):
                    layer = key.family.Block(config, index)
            except (RuntimeError, TypeError):  # a module reads values while it is built
                layer = key.family.Block(config, index)
            flops += flops_of(layer, True, keys)[0]
    return flops / 6 / config.layers  # 2 per multiply-add, forward and twice backward


def flops_of_product(weight: nn.Parameter, passes: bool) -> int:
    """Return the FLOPs of a token's product with a weight. passes: whether its input has a
    gradient."""
    return 2 * weight.numel() * (1 + weight.requires_grad + passes)


def flops_of(module: nn.Module, passes: bool, seq_length: int) -> tuple[int, bool]:
    """Return the FLOPs of a module, and whether what it returns has a gradient.

    Modules are assumed to run in the order in which they were created. passes: whether the input
    of the module has a gradient. seq_length: 0 inside a module that declares score_features.
    """
    returns = passes or any(parameter.requires_grad for parameter in module.parameters())
    flops, inner = 0, passes
    multiplied = module.multiplied if isinstance(module, ShardedModule) else ()
    for name in ("weight",) if isinstance(module, nn.Linear) else multiplied:
        weight = getattr(module, name)
        flops += round(declared(module, "token_share") * flops_of_product(weight, inner))
        inner = inner or weight.requires_grad
    seq_length = min(seq_length, declared(module, "window") or seq_length)
    features = declared(module, "score_features")
    if features is not None:
        flops += 4 * features * seq_length * (3 if returns else 1)
        seq_length = 0
    inner = passes
    for child in module.children():
        of_child, after = flops_of(child, inner, seq_length)
        flops += of_child
        if not declared(module, "same_input"):
            inner = after
    return flops, returns
