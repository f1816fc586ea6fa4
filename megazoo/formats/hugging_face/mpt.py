"""MPT in Hugging Face directories: fields of config.json.

They are defined by llm-foundry. The port in transformers has only some of them. It ignores
alibi, qk_ln, no_bias and other fields.
"""

from typing import Any

from megazoo.errors import UserError
from megazoo.formats.hugging_face.config import ConfigReader, head_to_hugging_face

FIELDS = {
    "vocab_size": "vocab_size",
    "max_seq_len": "max_positions",
    "d_model": "hidden_size",
    "n_layers": "layers",
    "n_heads": "heads",
    "learned_pos_emb": "learned_positions",
    "emb_pdrop": "embedding_dropout",
    "resid_pdrop": "residual_dropout",
    "tie_word_embeddings": "tie_embeddings",
}
ALIASES = {
    "num_attention_heads": "n_heads",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
}


def read_config(fields: ConfigReader, defaults: type) -> dict[str, Any]:
    """Return the values of an MPTConfig, as llm-foundry defines them. defaults: its class. Raises
    UserError for a field that is not supported."""
    fields.rename(ALIASES)
    for name in ("vocab_size", "max_seq_len", "d_model", "n_layers", "n_heads"):
        if name not in fields.values:
            raise UserError(f"the config has no {name}")
    values = fields.renamed(FIELDS, defaults)
    hidden, heads = values["hidden_size"], values["heads"]
    fields.only("norm_type", "low_precision_layernorm", "layernorm")
    fields.only("embedding_fraction", 1.0)
    fields.only("final_logit_softcapping", None)
    fields.only("block_overrides", None)
    fields.only("fuse_norm_attn_norm", False)  # True changes the names of the weights
    fields.only("head_dim", hidden // max(heads, 1))
    bias = not fields.take("no_bias", True)
    fields.only("attention_bias", bias)  # llm-foundry writes it, too
    older_epsilon = fields.take("layer_norm_epsilon", defaults.norm_epsilon)
    values["norm_epsilon"] = fields.take("norm_eps", older_epsilon)
    values["logit_scale"] = _read_logit_scale(fields, hidden)
    ratio = min(fields.take("expansion_ratio", 4.0), 1e6)
    values["ffn_size"] = int(hidden * ratio)
    _check_feed_forward(fields.nested("ffn_config"))
    attention = _read_attention(fields.nested("attn_config"), heads, bias)
    return {**values, **attention, **fields.head(), "bias": bias}


def _read_logit_scale(fields: ConfigReader, hidden_size: int) -> float | None:
    scale = fields.take("logit_scale")
    if not isinstance(scale, str):
        return scale
    if scale != "inv_sqrt_d_model":
        raise UserError(
            f"logit_scale {scale!r} is not supported: it must be a number or 'inv_sqrt_d_model'"
        )
    return hidden_size**-0.5


def _check_feed_forward(fields: ConfigReader) -> None:
    fields.only("ffn_type", "mptmlp")
    fields.only("ffn_act_fn", None, {"name": "gelu"}, {"name": "gelu", "approximate": "none"})
    fields.ignore_rest()


def _read_attention(fields: ConfigReader, heads: int, bias: bool) -> dict[str, Any]:
    """Return the values of an MPTConfig that are in attn_config."""
    fields.only("prefix_lm", False)
    fields.only("attn_uses_sequence_id", False)
    fields.only("rope", False)
    fields.only("nope", False)
    fields.only("qk_gn", False)
    fields.only("attention_bias", bias)
    fields.only("sliding_window_size", -1)
    fields.only("seq_parallel_world_size", 1)
    for name in ("attn_logit_softcapping", "kv_dim", "reuse_kv_layer_idx"):
        fields.only(name, None)
    tuning = fields.nested("attn_temperature_tuning")
    tuning.only("attn_scale", 0.0)
    tuning.take("floor_scale")  # no effect, because the scale is 0
    tuning.ignore_rest()
    values = {
        "kv_heads": _read_kv_heads(fields, heads),
        "alibi": fields.take("alibi", True),
        "alibi_bias_max": float(fields.take("alibi_bias_max", 8.0)),
        "clip_qkv": fields.take("clip_qkv", 0.0) or None,
        "qk_norm": fields.take("qk_ln", False),
        "softmax_scale": fields.take("softmax_scale"),
        "attention_dropout": float(fields.take("attn_pdrop", 0.0)),
    }
    for name in ("rope_theta", "rope_impl", "rope_dail_config", "rope_hf_config"):
        fields.take(name)  # of rope, which is off
    fields.ignore_rest()
    return values


def _read_kv_heads(fields: ConfigReader, heads: int) -> int:
    kind = fields.take("attn_type", "multihead_attention")
    kv_heads = {"multihead_attention": heads, "multiquery_attention": 1}.get(kind)
    if not kv_heads and kind == "grouped_query_attention":
        kv_heads = fields.take("kv_n_heads")
    if not kv_heads or fields.take("kv_n_heads", kv_heads) != kv_heads:
        raise UserError(f"attn_config.attn_type {kind!r} is not supported with these kv_n_heads")
    return kv_heads


def write_config(config: Any) -> dict[str, Any]:
    """Return the values of config.json for an MPTConfig. Raises UserError for settings that the
    port in transformers does not compute, even if its config has a field for them."""
    fixed = {
        "alibi": True,
        "alibi_bias_max": 8.0,
        "qk_norm": False,
        "bias": False,
        "kv_heads": config.heads,
        "ffn_size": 4 * config.hidden_size,
        "logit_scale": None,
    }
    for name, value in fixed.items():
        if getattr(config, name) != value:
            raise UserError(
                f"can't be a Hugging Face model with {name} {getattr(config, name)!r}: "
                f"transformers' MPT has {value!r} only"
            )
    values = {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()}
    return {
        **head_to_hugging_face(config, "MptForCausalLM"),
        "model_type": "mpt",
        **values,
        "layer_norm_epsilon": float(config.norm_epsilon),
        "expansion_ratio": 4,
        "no_bias": True,
        "attn_config": {
            "alibi": True,
            "clip_qkv": config.clip_qkv and float(config.clip_qkv),
            "softmax_scale": None if config.softmax_scale is None else float(config.softmax_scale),
        },
    }
