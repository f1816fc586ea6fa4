"""GPT-NeoX in Hugging Face directories: fields of config.json."""

from typing import Any

from megazoo.formats.hugging_face.config import ConfigReader, head_to_hugging_face

FIELDS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn_size",
    "hidden_act": "activation",
    "layer_norm_eps": "norm_epsilon",
    "use_parallel_residual": "parallel",
    "attention_bias": "attention_bias",
    "attention_dropout": "attention_dropout",
    "hidden_dropout": "residual_dropout",
    "tie_word_embeddings": "tie_embeddings",
}


def read_config(fields: ConfigReader, defaults: type) -> dict[str, Any]:
    """Return the values of a PythiaConfig. defaults: its class. Raises UserError for a field that
    is not supported."""
    values = fields.renamed(FIELDS, defaults)
    theta = fields.take("rotary_emb_base", defaults.rope_theta)
    fraction = fields.take("rotary_pct", defaults.rotary_fraction)  # the names in older files
    fields.only("rope_scaling", None)
    fields.only("head_dim", values["hidden_size"] // max(values["heads"], 1))
    rope = fields.nested("rope_parameters")
    rope.rename({} if "rope_type" in rope.values else {"type": "rope_type"})  # the older name
    rope.only("rope_type", "default")
    values["rope_theta"] = float(rope.take("rope_theta", float(theta)))
    values["rotary_fraction"] = rope.take("partial_rotary_factor", float(fraction))
    rope.ignore_rest()
    return {**values, **fields.head()}


def write_config(config: Any) -> dict[str, Any]:
    """Return the values of config.json for a PythiaConfig."""
    values = {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()}
    return {
        **head_to_hugging_face(config, "GPTNeoXForCausalLM"),
        "model_type": "gpt_neox",
        **values,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.rotary_fraction,
        },
    }
