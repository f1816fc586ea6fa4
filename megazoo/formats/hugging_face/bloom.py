"""BLOOM in Hugging Face directories: fields of config.json."""

from typing import Any

from megazoo.formats.hugging_face.config import ConfigReader, head_to_hugging_face

FIELDS = {
    "vocab_size": "vocab_size",
    "seq_length": "max_positions",
    "hidden_size": "hidden_size",
    "n_layer": "layers",
    "n_head": "heads",
    "layer_norm_epsilon": "norm_epsilon",
    "apply_residual_connection_post_layernorm": "residual_after_norm",
    "attention_dropout": "attention_dropout",
    "hidden_dropout": "residual_dropout",
    "tie_word_embeddings": "tie_embeddings",
}
ALIASES = {
    "n_embed": "hidden_size",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}
# Fields of the published files. They have no effect on the result.
IGNORED = (
    "attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion n_inner "
    "offset_alibi skip_bias_add skip_bias_add_qkv"
).split()


def read_config(fields: ConfigReader, defaults: type) -> dict[str, Any]:
    """Return the values of a BloomConfig. defaults: its class. Raises UserError for a field that is
    not supported."""
    fields.rename(ALIASES)
    fields.only("slow_but_exact", False)  # transformers then omits biases
    for name in IGNORED:
        fields.take(name)
    return {**fields.renamed(FIELDS, defaults), **fields.head()}


def write_config(config: Any) -> dict[str, Any]:
    """Return the values of config.json for a BloomConfig."""
    values = {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()}
    return {**head_to_hugging_face(config, "BloomForCausalLM"), "model_type": "bloom", **values}
