"""Falcon in Hugging Face directories: fields of config.json."""

from typing import Any

from megazoo.formats.hugging_face.config import ConfigReader, head_to_hugging_face

FIELDS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "ffn_hidden_size": "ffn_size",
    "bias": "bias",
    "activation": "activation",
    "layer_norm_epsilon": "norm_epsilon",
    "attention_dropout": "attention_dropout",
    "hidden_dropout": "residual_dropout",
    "tie_word_embeddings": "tie_embeddings",
}


def read_config(fields: ConfigReader, defaults: type) -> dict[str, Any]:
    """Return the values of a FalconConfig. defaults: its class. Raises UserError for a field that
    is not supported."""
    fields.rename({"n_embed": "hidden_size"})  # in older files
    values = fields.renamed(FIELDS, defaults)
    fields.only("alibi", False)
    fields.only("apply_residual_connection_post_layernorm", False)  # in older files
    new = fields.take("new_decoder_architecture", False)
    kv_heads, one = fields.take("num_kv_heads", values["heads"]), fields.take("multi_query", True)
    values["kv_heads"] = kv_heads if new else 1 if one else values["heads"]
    if not new and not one:
        fields.values["num_kv_heads"] = kv_heads
        fields.only("num_kv_heads", values["heads"])
    if not new:
        fields.only("num_ln_in_parallel_attn", 1)
    norms = fields.take("num_ln_in_parallel_attn", 2 if new else 1)
    values["separate_norms"] = new and norms == 2
    fields.only("parallel_attn", True)
    theta = fields.take("rope_theta", defaults.rope_theta)
    fields.only("rope_scaling", None)
    rope = fields.nested("rope_parameters")
    rope.rename({} if "rope_type" in rope.values else {"type": "rope_type"})  # the older name
    rope.only("rope_type", "default")
    values["rope_theta"] = float(rope.take("rope_theta", float(theta)))
    rope.ignore_rest()
    return {**values, **fields.head()}


def write_config(config: Any) -> dict[str, Any]:
    """Return the values of config.json for a FalconConfig."""
    values = {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()}
    new = config.separate_norms or 1 < config.kv_heads < config.heads  # the form of falcon-40b
    return {
        **head_to_hugging_face(config, "FalconForCausalLM"),
        "model_type": "falcon",
        **values,
        "new_decoder_architecture": new,
        "num_kv_heads": config.kv_heads if new else config.heads,
        "multi_query": new or config.kv_heads == 1,
        "num_ln_in_parallel_attn": 1 + config.separate_norms if new else None,
        "parallel_attn": True,
        "alibi": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }
