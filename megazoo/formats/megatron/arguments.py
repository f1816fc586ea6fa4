"""Convert Megatron-LM's arguments to a megazoo config.

An argument that changes the computation is used, or raises an error that names it. The others
describe the training.
"""

from typing import Any

from megazoo.errors import UserError
from megazoo.families.config import ModelConfig
from megazoo.families.registry import config_from_dict
from megazoo.formats.hugging_face.config import ConfigReader

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The supported values of some arguments. An argument that is missing or None has the first value.
SUPPORTED: dict[str, tuple] = {
    "num_experts": (None, 0),
    "num_moe_experts": (None, 0),
    "multi_latent_attention": (False,),
    "mtp_num_layers": (None, 0),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "is_hybrid_model": (False,),
    "hybrid_override_pattern": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_block_specs": (False,),
    "retro_add_retriever": (False,),
    "use_legacy_models": (False,),
    "rotary_interleaved": (False,),
    "no_rope_freq": (None, 0),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_output_gate": (False,),
    "qk_l2_norm": (False,),
    "softmax_type": ("vanilla",),
    "softmax_scale": (None,),
    "window_attn_skip_freq": (None,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "use_te_activation_func": (False,),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (None,),
}


def values_of(arguments: Any) -> dict:
    """Return the arguments, by name, from the placeholder of the object that has them. Raises
    UserError if it has no arguments."""
    values = getattr(arguments, "state", arguments)
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise UserError("it has no arguments (args), which describe the model")
    return values


def adds_one_to_norms(values: dict) -> bool:
    """Return whether norms multiply by their weights + 1."""
    return any(values.get(name) for name in ("apply_layernorm_1p", "layernorm_zero_centered_gamma"))


def config_of(values: dict, vocab_size: int) -> ModelConfig:
    """Return the megazoo config for Megatron's arguments. values: the arguments, by name. Raises
    UserError with the name and value of an argument that is not supported."""
    args = ConfigReader(values)
    for name, supported in SUPPORTED.items():
        args.only(name, *supported)
    sizes = {
        "vocab_size": vocab_size,
        "max_positions": args.take("max_position_embeddings", args.take("seq_length", 0)),
        "hidden_size": args.take("hidden_size", 0),
        "layers": args.take("num_layers", 0),
        "heads": args.take("num_attention_heads", 0),
        "tie_embeddings": not args.take("untie_embeddings_and_output_weights", False),
        "attention_dropout": args.take("attention_dropout", 0.1),
    }
    sizes["ffn_size"] = args.take("ffn_hidden_size", 4 * sizes["hidden_size"])
    kind = (_normalization(args), _positions(args), args.take("swiglu", False))
    builders = {
        ("LayerNorm", "learned_absolute", False): _gpt2,
        ("LayerNorm", "rope", False): _pythia,
        ("RMSNorm", "rope", True): _llama,
    }
    if kind not in builders:
        raise UserError(
            f"normalization {kind[0]}, position_embedding_type {kind[1]} and swiglu "
            f"{kind[2]} are not supported together"
        )
    family, own = builders[kind](args, sizes)
    return config_from_dict(family, {**sizes, **own})


def _normalization(args: ConfigReader) -> str:
    return args.take("normalization", "LayerNorm")


def _positions(args: ConfigReader) -> str:
    """Return the kind of positions. Older versions had a flag for it."""
    older = "rope" if args.take("use_rotary_position_embeddings", False) else "learned_absolute"
    return args.take("position_embedding_type", older)


def _gpt2(args: ConfigReader, sizes: dict) -> tuple[str, dict]:
    _check_plain_attention(args, sizes)
    dropout = args.take("hidden_dropout", 0.1)
    return "gpt2", {
        "activation": _gelu(args),
        "layer_norm_epsilon": _epsilon(args),
        "embedding_dropout": dropout,
        "residual_dropout": dropout,
    }


def _pythia(args: ConfigReader, sizes: dict) -> tuple[str, dict]:
    _check_plain_attention(args, sizes)
    for name in ("rotary_seq_len_interpolation_factor", "use_rope_scaling"):
        args.only(name, None, False)
    return "pythia", {
        "activation": _gelu(args),
        "norm_epsilon": _epsilon(args),
        "rope_theta": float(args.take("rotary_base", 10000.0)),
        "rotary_fraction": float(args.take("rotary_percent", 1.0)),
        "parallel": False,
        "residual_dropout": args.take("hidden_dropout", 0.1),
    }


def _llama(args: ConfigReader, sizes: dict) -> tuple[str, dict]:
    """Return the fields of the config, and the family: LLaMA, or one with features that LLaMA
    lacks."""
    args.only("rotary_percent", 1.0)
    values = {
        "kv_heads": _groups(args, sizes["heads"]),
        "head_size": _head_size(args, sizes),
        "norm_epsilon": _epsilon(args),
        "rope_theta": float(args.take("rotary_base", 10000.0)),
        "rope_scaling": _rope_scaling(args),
    }
    biases, qkv_bias = args.take("add_bias_linear", True), args.take("add_qkv_bias", False)
    window = _window(args)
    if args.take("qk_layernorm", False):
        if biases or qkv_bias:
            name = "add_bias_linear" if biases else "add_qkv_bias"
            raise UserError(f"{name} True is not supported with qk_layernorm")
        return "qwen3", {**values, "window": window}
    if biases:
        if window:
            raise UserError("add_bias_linear True is not supported with window_size")
        return "llama", {**values, "attention_bias": True, "mlp_bias": True}
    if qkv_bias:
        return "qwen2", {**values, "window": window}
    return ("mistral", {**values, "window": window}) if window else ("llama", values)


def _check_plain_attention(args: ConfigReader, sizes: dict) -> None:
    """Raise UserError for settings that megazoo's models with LayerNorm don't support."""
    for name, only in (("add_bias_linear", True), ("qk_layernorm", False), ("window_size", None)):
        args.only(name, only)
    if (groups := _groups(args, sizes["heads"])) != sizes["heads"]:
        raise UserError(f"num_query_groups {groups} is not supported with LayerNorm")
    if head_size := _head_size(args, sizes):
        raise UserError(f"kv_channels {head_size} is not supported with LayerNorm")


def _gelu(args: ConfigReader) -> str:
    """Return the kind of GELU. Megatron's default, the fused one, is the tanh approximation."""
    fused = args.take("bias_gelu_fusion", True)
    return "gelu_new" if args.take("openai_gelu", False) or fused else "gelu"


def _epsilon(args: ConfigReader) -> float:
    older = args.take("layernorm_epsilon", 1e-5)
    return args.take("norm_epsilon", older)


def _groups(args: ConfigReader, heads: int) -> int:
    """Return the number of KV heads. Megatron ignores its argument unless grouped queries are
    enabled."""
    groups = args.take("num_query_groups", heads)
    return groups if args.take("group_query_attention", True) else heads


def _head_size(args: ConfigReader, sizes: dict) -> int:
    """Return the head size; 0 if it follows from the other sizes."""
    size = args.take("kv_channels", 0)
    return 0 if size * sizes["heads"] == sizes["hidden_size"] else size


def _window(args: ConfigReader) -> int:
    """Return the number of tokens that a query attends to, itself included; 0: all tokens before
    it. Megatron does not count the query itself, and -1 means all."""
    window = args.take("window_size")
    if window is None:
        return 0
    is_pair = isinstance(window, list | tuple) and len(window) == 2
    if not is_pair or not all(type(size) is int for size in window):
        raise UserError(f"window_size {window!r} is not supported: it must be two numbers")
    before, after = window
    if after > 0:
        raise UserError(f"window_size {window!r} is not supported: it includes later tokens")
    return before + 1 if before >= 0 else 0


def _rope_scaling(args: ConfigReader) -> dict | None:
    """Return the scaling of the rotary embeddings, in Hugging Face's format."""
    interpolation = args.take("rotary_seq_len_interpolation_factor", 0.0)
    factor = args.take("rope_scaling_factor", 8.0)
    if not args.take("use_rope_scaling", False):
        return {"rope_type": "linear", "factor": float(interpolation)} if interpolation else None
    if interpolation:
        raise UserError(
            "use_rope_scaling is not supported with rotary_seq_len_interpolation_factor"
        )
    return {**LLAMA3_SCALING, "factor": float(factor)}
