"""GPT-2 in Hugging Face directories: names of tensors and fields of config.json."""

from typing import Any

from megazoo.models.hugging_face.config import ConfigReader, head_to_hugging_face
from megazoo.models.hugging_face.names import HFFiles, HFNames

FILES = HFFiles(
    prefix="transformer.",
    legacy=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",  # buffers in older files
)
NAMES = {
    "embedding": HFNames("transformer.wte"),
    "position_embedding": HFNames("transformer.wpe"),
    "layers.{}.attention_norm": HFNames("transformer.h.{}.ln_1"),
    "layers.{}.attention.qkv": HFNames("transformer.h.{}.attn.c_attn", transposed=True),
    "layers.{}.attention.output": HFNames("transformer.h.{}.attn.c_proj", transposed=True),
    "layers.{}.mlp_norm": HFNames("transformer.h.{}.ln_2"),
    "layers.{}.mlp.up": HFNames("transformer.h.{}.mlp.c_fc", transposed=True),
    "layers.{}.mlp.down": HFNames("transformer.h.{}.mlp.c_proj", transposed=True),
    "norm": HFNames("transformer.ln_f"),
    "head": HFNames("lm_head"),
    "score": HFNames("score"),
}
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
