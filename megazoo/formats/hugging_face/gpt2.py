"""GPT-2 in Hugging Face directories: fields of config.json."""

from typing import Any

from megazoo.formats.hugging_face.config import ConfigReader, head_to_hugging_face

FIELDS = {
    "vocab_size": "vocab_size",
    "n_positions": "max_positions",
    "n_embd": "hidden_size",
    "n_layer": "layers",
    "n_head": "heads",
    "n_inner": "ffn_size",
    "embd_pdrop": "embedding_dropout",
    "attn_pdrop": "attention_dropout",
    "resid_pdrop": "residual_dropout",
    "activation_function": "activation",
    "scale_attn_weights": "scale_attention",
    "scale_attn_by_inverse_layer_idx": "scale_by_inverse_layer",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "tie_word_embeddings": "tie_embeddings",
}
ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def read_config(fields: ConfigReader, defaults: type) -> dict[str, Any]:
    """Return the values of a GPT2Config. defaults: its class. Raises UserError for a field that is
    not supported."""
    fields.rename(ALIASES)
    fields.only("add_cross_attention", False)
    return {**fields.renamed(FIELDS, defaults), **fields.head()}


def write_config(config: Any) -> dict[str, Any]:
    """Return the values of config.json for a GPT2Config."""
    values = {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()}
    return {**head_to_hugging_face(config, "GPT2LMHeadModel"), "model_type": "gpt2", **values}
