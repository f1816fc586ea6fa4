"""Counts the parameters and the FLOPs of a model."""

from torch import nn

from megazoo.models.registry import FAMILIES, family_of
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import ShardedModule


def parameter_count(config, train_only: str | None = None) -> int:
    """Return the number of parameters of the whole model; a tied head counts once. train_only: as
    in `Model.train_only`."""
    model = FAMILIES[family_of(config)].on_meta(config, ParallelContext())
    if train_only:
        model.train_only(train_only)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def flops_per_token(config, seq_length: int) -> int:
    """Return the FLOPs a token of a training step that MFU counts (Chowdhery et al. 2022, appendix
    B): those of all matrix products, forward and backward, nothing twice, and attention's not
    halved for its mask.

    Matrices are those that a ShardedModule names in `multiplied`, and the output head. Attention is
    what a module says in `score_features`: the features over which its queries and keys are
    multiplied, over all tp ranks. Of modules inside one that says so none is asked: its
    QKVParallelLinear says the same.
    """
    model = FAMILIES[family_of(config)].on_meta(config, ParallelContext())
    sharded = [module for module in model.modules() if isinstance(module, ShardedModule)]
    products = [getattr(module, name) for module in sharded for name in module.multiplied]
    products += [] if model.num_labels else [model.output_head.weight]
    return 6 * sum(weight.numel() for weight in products) + 12 * _score_features(model) * seq_length


def _score_features(module: nn.Module) -> int:
    """Sum the score_features of the outermost modules that say them."""
    own = getattr(module, "score_features", None)
    return sum(map(_score_features, module.children())) if own is None else own
