"""Megatron-LM's names for megazoo's tensors."""

import re
from collections.abc import Collection

from megazoo.families.names import HFNames

LAYER = re.compile(r"\blayers\.(\d+)\.")
# The first of several spellings is from Transformer Engine or from newer versions.
NAMES: dict[str, list[tuple[str, ...]]] = {
    "embedding": [("embedding.word_embeddings.{}",)],
    "position_embedding": [("embedding.position_embeddings.{}",)],
    "attention_norm": [("self_attention.linear_qkv.layer_norm_{}",), ("input_layernorm.{}",)],
    "attention.qkv": [("self_attention.linear_qkv.{}",)],
    "attention.q_norm": [("self_attention.q_layernorm.{}",)],
    "attention.k_norm": [("self_attention.k_layernorm.{}",)],
    "attention.output": [("self_attention.linear_proj.{}",)],
    "mlp_norm": [("mlp.linear_fc1.layer_norm_{}",), ("pre_mlp_layernorm.{}",)],
    "mlp.gate_up": [("mlp.linear_fc1.{}_w", "mlp.linear_fc1.{}_v"), ("mlp.linear_fc1.{}",)],
    "mlp.up": [("mlp.linear_fc1.{}",)],
    "mlp.down": [("mlp.linear_fc2.{}",)],
    "norm": [("decoder.final_layernorm.{}",)],
    "head": [("output_layer.{}",)],
}
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
# Tensors that are not weights: states of the optimizer, random generators, Transformer Engine.
STATE = re.compile(
    r"optimizer\..*|chained_\d+\..*|rng_state.*|rerun_state.*|.*_extra_state.*|.*\.inv_freq"
)
# Kinds of models that are not supported, by a pattern in the names of their tensors.
NOT_OURS = {
    r"experts|router": "a mixture of experts",
    r"linear_q_(down|up)_proj|linear_kv_(down|up)_proj|kv_layernorm": "multi-latent attention",
    r"^mtp\.": "multi-token prediction",
    r"mixer": "a state-space model",
    r"cross_attention|inter_attention|^encoder\.": "an encoder",
    r"^language_model\.": "a model from before Megatron Core, or one of images",
}


def bare_name(name: str) -> str:
    """Return the name of a tensor without the prefixes of model wrappers."""
    return re.sub(r"^((model|module)\.)+", "", name)


def is_state(name: str) -> bool:
    """Return whether a name is a state, not a weight."""
    return bool(STATE.fullmatch(name))


def kind_of(name: str) -> str | None:
    """Return the kind of an unsupported model that has a tensor of this name, or None."""
    return next((what for part, what in NOT_OURS.items() if re.search(part, name)), None)


def their_names(name: str, there: Collection[str]) -> HFNames:
    """Return Megatron's names for a global megazoo tensor: the spelling that is in `there`,
    otherwise the last one.

    name: such as "layers.17.attention.qkv.weight". there: Megatron's names of all tensors.
    """
    layer = LAYER.match(name)
    module, _, kind = name[layer.end() if layer else 0 :].rpartition(".")
    prefix = f"decoder.layers.{layer[1]}." if layer else ""
    for spelling in NAMES[module]:
        names = tuple(prefix + part.format(kind) for part in spelling)
        if names[0] in there:
            break
    return HFNames(*names, grouped=module == "attention.qkv")
