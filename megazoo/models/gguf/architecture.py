"""How GGUF names and orders what a model has, both ways: between its metadata and the values of a
Hugging Face config.json, and between its tensors and Hugging Face's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megazoo.errors import UserError
from megazoo.files import convert
from megazoo.gguf_file import GGUF, library
from megazoo.layers.rotary import Rotary

# By general.architecture, the model_type in transformers. Mistral's files are of llama, too.
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Each pair of features that rotary positions turn is of neighbours in files of llama; transformers
# has the first of all pairs, then the second.
IN_PAIRS = ("llama",)
EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"  # of llama3's scaling: what divides each frequency
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # of all published models, but for the factor
NUMBERS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
HARMLESS = {"vocab_size", "tensor_data_layout"}  # the size of the embedding counts
UNUSED = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}  # if they are there


def config_values(contents: GGUF) -> dict[str, Any]:
    """Return what a Hugging Face config.json says of the model in a GGUF file. UserError names what
    is missing, or changes the mathematics and is not supported."""
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
    """Return the shape of a tensor as torch has it, which GGUF names from the last dimension."""
    return tuple(int(size) for size in reversed(tensors[name].shape))


def _shortest(number: Any) -> Any:
    """Return the shortest float that is the same in fp32, which is how GGUF keeps it: 1e-05."""
    return float(str(np.float32(number))) if isinstance(number, float) else number


def _head_sizes(values: dict[str, Any], left: dict[str, Any]) -> dict[str, int]:
    """Return head_dim where it does not follow from the hidden size."""
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
    left.pop("rope.scaling.finetuned", None)  # says nothing of the mathematics
    if ROPE_FACTORS not in contents.tensors:
        return rope
    factors = torch.from_numpy(np.array(contents.tensors[ROPE_FACTORS].data, np.float32))
    scaling: dict[str, Any] = {**LLAMA3, "factor": float(factors.max())}
    expected = rope_factors(head_size(values), theta, values["max_position_embeddings"], scaling)
    if kind != "none" or factors.shape != expected.shape or not factors.allclose(expected):
        raise UserError(f"{ROPE_FACTORS} is not supported: it is not llama3's scaling")
    return rope | scaling


def rope_factors(size: int, theta: float, positions: int, scaling: dict) -> torch.Tensor:
    """Return what a scaling divides the frequency of each pair of features by, [size / 2]."""
    plain, _ = Rotary(size, theta, positions).frequencies(torch.device("cpu"))
    scaled, _ = Rotary(size, theta, positions, scaling).frequencies(torch.device("cpu"))
    return plain / scaled


def gguf_name_of(architecture: str, layers: int) -> Callable[[str], str]:
    """Return the function from Hugging Face's names of tensors to those of a GGUF file."""
    gguf = library()
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, layers)

    def name_of(theirs: str) -> str:
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UserError(f"GGUF has no name for {theirs} in the architecture {architecture}")
        return name

    return name_of


def head_rows(architecture: str, values: dict[str, Any], theirs: str) -> int:
    """Return the features of a head if GGUF has the rows of one of Hugging Face's tensors in pairs
    (see IN_PAIRS), 0 otherwise."""
    turned = ".self_attn.q_proj." in theirs or ".self_attn.k_proj." in theirs
    return head_size(values) if architecture in IN_PAIRS and turned else 0


def head_size(values: dict[str, Any]) -> int:
    """Return the features of a head, as a Hugging Face config.json says them."""
    return values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]


def rows_in_pairs(start: int, stop: int, size: int) -> np.ndarray:
    """Return where rows start to stop of Hugging Face's stand in a tensor that has them in pairs.
    size: the features of a head."""
    head, row = np.divmod(np.arange(start, stop), size)
    half, pair = np.divmod(row, size // 2)
    return head * size + 2 * pair + half
