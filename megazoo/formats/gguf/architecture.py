"""Convert between GGUF and Hugging Face, in both directions: metadata and config.json, names and
row order of tensors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megazoo.errors import UserError
from megazoo.files import convert
from megazoo.gguf_file import GGUF, library
from megazoo.layers.rotary import Rotary

# The model_type in transformers by general.architecture. Mistral files have llama, too.
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Rotary embeddings rotate pairs of features. In llama files the two features of a pair are
# adjacent; in transformers the first features of all pairs come first, then the second ones.
IN_PAIRS = ("llama",)
EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"  # of llama3 scaling: the divisors of the frequencies
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # common to the published models, except the factor
NUMBERS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
HARMLESS = {"vocab_size", "tensor_data_layout"}  # the shape of the embedding is used instead
UNUSED = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}  # if present


def config_values(contents: GGUF) -> dict[str, Any]:
    """Return the values of a Hugging Face config.json for the model in a GGUF file. Raises
    UserError for metadata that is missing, or that changes the computation and is not supported."""
    metadata, tensors = contents.metadata, contents.tensors
    architecture = convert(metadata.get("general.architecture", ""), str, "general.architecture")
    if architecture not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise UserError(f"general.architecture {architecture!r} is not supported: only {known}")
    start = f"{architecture}."
    left = {key.removeprefix(start): v for key, v in metadata.items() if key.startswith(start)}
    if EMBEDDING not in tensors:
        raise UserError(f"it has no tensor {EMBEDDING}")
    left.setdefault("attention.head_count_kv", left.get("attention.head_count"))
    values: dict[str, Any] = {
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": shape_of(tensors, EMBEDDING)[0],
    }
    for key, theirs in NUMBERS.items():
        if (number := left.pop(key, None)) is None:
            raise UserError(f"it has no {start}{key}")
        values[theirs] = _shortest(number)
    layers = values["num_hidden_layers"]
    if not isinstance(layers, int) or layers > len(tensors):
        raise UserError(f"it has {len(tensors)} tensors for {start}block_count {layers}")
    values |= _head_sizes(values, left)
    values["rope_parameters"] = _rope(values, left, contents)
    values["tie_word_embeddings"] = "output.weight" not in tensors
    for field, tensor in (("attention_bias", "attn_output.bias"), ("mlp_bias", "ffn_down.bias")):
        if f"blk.0.{tensor}" in tensors:
            values[field] = True
    for key, harmless in UNUSED.items():
        if left.get(key) == harmless:
            del left[key]
    for key in sorted(left.keys() - HARMLESS):
        raise UserError(f"{start}{key} {left[key]!r} is not supported")
    return values


def shape_of(tensors: dict, name: str) -> tuple[int, ...]:
    """Return the shape of a tensor in torch's order. GGUF lists the last dimension first."""
    return tuple(int(size) for size in reversed(tensors[name].shape))


def _shortest(number: Any) -> Any:
    """Return the float with the fewest digits that has the same fp32 value, such as 1e-05. GGUF
    stores fp32."""
    return float(str(np.float32(number))) if isinstance(number, float) else number


def _head_sizes(values: dict[str, Any], left: dict[str, Any]) -> dict[str, int]:
    """Return head_dim if it does not follow from the hidden size."""
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        raise UserError(f"attention.head_count {heads!r} is not supported: it must be one number")
    usual = hidden // heads
    size = left.pop("attention.key_length", None) or left.get("rope.dimension_count", usual)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := left.pop(key, size)) != size:
            raise UserError(f"{key} {other} is not supported: heads have {size} features")
    return {} if size == usual and size * heads == hidden else {"head_dim": size}


def _rope(values: dict[str, Any], left: dict[str, Any], contents: GGUF) -> dict[str, Any]:
    """Return the rope_parameters of config.json."""
    for key in ("rope.freq_base", "rope.scaling.factor"):
        if key in left:
            left[key] = convert(left[key], float, key)
    theta = _shortest(left.pop("rope.freq_base", 10000.0))
    kind = left.pop("rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_theta": theta}
    rope["rope_type"] = "default" if kind == "none" else kind
    if kind == "linear":
        rope["factor"] = _shortest(left.pop("rope.scaling.factor", 1.0))
    elif kind == "yarn":
        rope["factor"] = _shortest(left.pop("rope.scaling.factor", 1.0))
        original = left.pop("rope.scaling.original_context_length", None)
        rope["original_max_position_embeddings"] = original or values["max_position_embeddings"]
    left.pop("rope.scaling.finetuned", None)  # does not affect the computation
    if ROPE_FACTORS not in contents.tensors:
        return rope
    factors = torch.from_numpy(np.array(contents.tensors[ROPE_FACTORS].data, np.float32))
    scaling: dict[str, Any] = {**LLAMA3, "factor": float(factors.max())}
    expected = rope_factors(head_size(values), theta, values["max_position_embeddings"], scaling)
    if kind != "none" or factors.shape != expected.shape or not factors.allclose(expected):
        raise UserError(f"{ROPE_FACTORS} is not supported: it is not llama3's scaling")
    return rope | scaling


def rope_factors(size: int, theta: float, positions: int, scaling: dict) -> torch.Tensor:
    """Return the divisors by which a scaling reduces the frequencies of the pairs of features:
    [size / 2]."""
    plain, _ = Rotary(size, theta, positions).frequencies(torch.device("cpu"))
    scaled, _ = Rotary(size, theta, positions, scaling).frequencies(torch.device("cpu"))
    return plain / scaled


def gguf_name_of(architecture: str, layers: int) -> Callable[[str], str]:
    """Return a function that maps Hugging Face tensor names to GGUF tensor names."""
    gguf = library()
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, layers)

    def name_of(theirs: str) -> str:
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UserError(f"GGUF can't represent {theirs} in the architecture {architecture}")
        return name

    return name_of


def head_rows(architecture: str, values: dict[str, Any], theirs: str) -> int:
    """Return the head size if GGUF stores the rows of this Hugging Face tensor in pairs (see
    IN_PAIRS), otherwise 0."""
    turned = ".self_attn.q_proj." in theirs or ".self_attn.k_proj." in theirs
    return head_size(values) if architecture in IN_PAIRS and turned else 0


def head_size(values: dict[str, Any]) -> int:
    """Return the head size that the values of a Hugging Face config.json define."""
    return values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]


def rows_in_pairs(start: int, stop: int, size: int) -> np.ndarray:
    """Return the indices, in a tensor with rows in pairs, of the Hugging Face rows `start` to
    `stop`. size: features per head."""
    head, row = np.divmod(np.arange(start, stop), size)
    half, pair = np.divmod(row, size // 2)
    return head * size + 2 * pair + half
