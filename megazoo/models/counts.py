"""Counts the parameters and the FLOPs of a model, in total or only of its trained parameters."""

from typing import Any

from megazoo.families.registry import FAMILIES, family_of
from megazoo.models.attachment import Attachment
from megazoo.models.base import Model
from megazoo.models.costs import flops_of, flops_of_product
from megazoo.parallel.context import ParallelContext


def parameter_count(
    config: Any, train_only: str | None = None, attached: Attachment | None = None
) -> int:
    """Return the number of parameters of the complete model; a tied head counts once. With
    train_only or attached, only trained parameters count: see `whole_model`."""
    model = whole_model(config, train_only, attached)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def whole_model(
    config: Any, train_only: str | None = None, attached: Attachment | None = None
) -> Model:
    """Build the complete model on the meta device, and freeze the parameters that a run does not
    train.

    attached: additional parameters, such as adapters. train_only: a pattern as in
    `Model.train_only`, which also applies to attached parameters. UserError if a name in either
    matches nothing.
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
    """Return the model FLOPs per token of a training step, as counted for MFU (Chowdhery et al.
    2022, appendix B).

    They are the FLOPs of all matrix products, forward and backward, without recomputation.
    Attention is not halved for its causal mask; with a window, only the window counts.

    Matrices are those that a ShardedModule names in `multiplied`, those of nn.Linear, and the
    output head. Each needs 2 FLOPs per weight forward, 2 for its gradient if it is trained, and 2
    for the gradient of its input if anything before it is trained. An attention module declares
    `score_features`: the number of features in the products of queries and keys, over all tp ranks.
    (Declarations of modules inside it, such as its QKVParallelLinear, are not counted again.)
    Attention needs 4 FLOPs per feature and token of the sequence forward, and 8 backward if
    anything before it is trained.

    Args:
        config: the model's config.
        seq_length: length of the sequences, in tokens.
        train_only, attached: which parameters are trained, as in `whole_model`; by default all.
    """
    model = whole_model(config, train_only, attached)
    all_trained = all(parameter.requires_grad for parameter in model.parameters())
    flops, passes = flops_of(model, all_trained, seq_length)
    if not model.config.num_labels:
        head: Any = model.output_head
        flops += flops_of_product(head.matrix, passes)
    return flops
