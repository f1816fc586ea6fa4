"""Mixtures of experts in Hugging Face directories: fields of config.json."""

from typing import Any

from megazoo.errors import UserError
from megazoo.formats.hugging_face.config import ConfigReader

FIELDS = {
    "num_experts_per_tok": "experts_per_token",
    "router_aux_loss_coef": "router_aux_loss_coef",
}
DENSE_LAYERS = "mlp_only_layers"
QWEN_FIELDS = {
    "moe_intermediate_size": "expert_size",
    "norm_topk_prob": "normalize_weights",
    "decoder_sparse_step": "sparse_step",
    DENSE_LAYERS: "dense_layers",
}


def read_experts(
    fields: ConfigReader, config_class: Any, counts: tuple[str, ...], more: dict[str, str]
) -> dict[str, Any]:
    """Return the values of ExpertsFields. Raises UserError for a field that is not supported.

    config_class: class of the config, with the defaults of transformers. counts: names of the field
    with the number of experts. more: further fields that the family has, with their megazoo names.
    """
    fields.take("output_router_logits", False)  # training always adds the auxiliary loss
    values = fields.renamed(
        FIELDS | {t: o for t, o in more.items() if t != DENSE_LAYERS}, config_class
    )
    if DENSE_LAYERS in more:
        values[more[DENSE_LAYERS]] = fields.take(DENSE_LAYERS, [])
    found = {name: fields.take(name, 0) for name in counts if name in fields.values}
    if len(set(found.values())) > 1:
        raise UserError(f"{' and '.join(counts)} must be equal, not {list(found.values())}")
    return values | {"experts": next(iter(found.values()), config_class.experts)}


def write_experts(config: Any, count: str, more: dict[str, str]) -> dict[str, Any]:
    """Return the fields from which `read_experts` reads a config. count: the name of the field with
    the number of experts."""
    if config.router_balance == "bias":
        raise UserError(
            "router_balance bias is not supported by transformers, whose files have no bias of the "
            "routers: use shards, or train with another balance"
        )
    values = {theirs: getattr(config, ours) for theirs, ours in (FIELDS | more).items()}
    if DENSE_LAYERS in values:
        values[DENSE_LAYERS] = list(values[DENSE_LAYERS])
    return values | {count: config.experts}
