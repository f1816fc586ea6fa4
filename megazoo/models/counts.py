"""Counts the parameters and the FLOPs of a model, and what of them is trained."""

from typing import Any

from torch import nn

from megazoo.layers.layer import declared
from megazoo.models.attachment import Attachment
from megazoo.models.base import Model
from megazoo.models.registry import FAMILIES, family_of
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import ShardedModule


def parameter_count(
    config: Any, train_only: str | None = None, attached: Attachment | None = None
) -> int:
    """Return the number of parameters of the whole model; a tied head counts once. train_only and
    attached: count those alone that are trained, as in `whole_model`."""
    model = whole_model(config, train_only, attached)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def whole_model(
    config: Any, train_only: str | None = None, attached: Attachment | None = None
) -> Model:
    """Make a whole model on the meta device, of which what a run does not train is frozen.

    attached: what it has beside its own weights, such as adapters. train_only: as in
    `Model.train_only`; of what is attached, too. UserError if either names what is not there.
    """
    model = FAMILIES[family_of(config)].on_meta(config, ParallelContext())
    if attached:
        attached.check_for(model)
        attached.attach(model)
    return model.train_only(train_only) if train_only else model


def flops_per_token(
    config: Any,
    seq_length: int,
    train_only: str | None = None,
    attached: Attachment | None = None,
) -> int:
    """Return the FLOPs a token of a training step that MFU counts (Chowdhery et al. 2022, appendix
    B): those of all matrix products, forward and backward, nothing twice, and attention's not
    halved for its mask; of an attention with a window, those within it.

    Matrices are those that a ShardedModule names in `multiplied`, those of nn.Linear, and the
    output head. Each takes 2 FLOPs a weight forward, 2 for its own gradient, if it is trained, and
    2 for its input's, if anything before it is trained. Attention is what a module says in
    `score_features`: the features over which its queries and keys are multiplied, over all tp
    ranks. Of modules inside one that says so none is asked: its QKVParallelLinear says the same. It
    takes 4 FLOPs a feature and token of the sequence forward, and 8 backward, if anything before it
    is trained.
    train_only, attached: what is trained, as in `whole_model`; all, by default.
    """
    model = whole_model(config, train_only, attached)
    all_trained = all(parameter.requires_grad for parameter in model.parameters())
    flops, passes = _flops(model, all_trained, seq_length)
    if not model.config.num_labels:
        head: Any = model.output_head
        flops += _of_product(head.matrix, passes)
    return flops


def _of_product(weight: nn.Parameter, passes: bool) -> int:
    """Return the FLOPs of a token's product with a weight. passes: whether its input has a
    gradient."""
    return 2 * weight.numel() * (1 + weight.requires_grad + passes)


def _flops(module: nn.Module, passes: bool, seq_length: int) -> tuple[int, bool]:
    """Return the FLOPs of a module, and whether what it returns has a gradient.

    Modules are taken to run in the order in which they were made. passes: whether what the module
    is given has a gradient. seq_length: 0 within one that has said its score_features.
    """
    returns = passes or any(parameter.requires_grad for parameter in module.parameters())
    flops, inner = 0, passes
    multiplied = module.multiplied if isinstance(module, ShardedModule) else ()
    for name in ("weight",) if isinstance(module, nn.Linear) else multiplied:
        weight = getattr(module, name)
        flops += _of_product(weight, inner)
        inner = inner or weight.requires_grad
    seq_length = min(seq_length, declared(module, "window") or seq_length)
    features = declared(module, "score_features")
    if features is not None:
        flops += 4 * features * seq_length * (3 if returns else 1)
        seq_length = 0
    inner = passes
    for child in module.children():
        of_child, after = _flops(child, inner, seq_length)
        flops += of_child
        if not declared(module, "same_input"):
            inner = after
    return flops, returns
