"""Tiny models of transformers: the config of every family, and models of GPT-2, LLaMA and MPT with
random weights."""

import torch
from transformers import (
    AutoConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
)
from transformers import LlamaConfig as HFLlamaConfig

from megazoo.models.llama import LlamaConfig
from tests.support.training import randomized_

LLAMA_SIZES = dict(
    vocab_size=61, max_positions=32, hidden_size=32, layers=3, heads=4, ffn_size=48
)  # fmt: skip
DEEP_LLAMA_SIZES = {**LLAMA_SIZES, "layers": 5, "heads": 8}


def scaled(rope_type: str, factor: float, context: int, **more) -> dict:
    """The settings of rotary positions beyond the original context."""
    if rope_type == "llama3":
        more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    original = {"original_max_position_embeddings": context}
    return {"rope_type": rope_type, "factor": factor, **more, **original}


ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3, of the model's context": scaled("llama3", 2.0, 32),
    "yarn, of the model's context": scaled("yarn", 2.0, 32),
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": scaled("llama3", 8.0, 16),
    "yarn": scaled("yarn", 4.0, 16),
    "yarn, untruncated": scaled(
        "yarn", 4.0, 16,
        truncate=False, beta_fast=16.0, beta_slow=2.0, mscale=1.2, mscale_all_dim=0.8,
    ),
    # 0: none, as configs of DeepSeek have it
    "yarn, of one mscale": scaled("yarn", 4.0, 16, mscale=1.2, mscale_all_dim=0.0),
}  # fmt: skip


WIDTHS = dict(
    hidden_size=32, intermediate_size=48, num_attention_heads=4, max_position_embeddings=32
)  # fmt: skip
GROUPED = {**WIDTHS, "num_key_value_heads": 2}
WINDOWS = dict(use_sliding_window=True, sliding_window=5, max_window_layers=2)
CONFIGS = {  # of transformers, but for the vocabulary and the layers
    "gpt2": dict(
        n_embd=32, n_head=4, n_positions=32, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0
    ),
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 5},
    "qwen2": {**GROUPED, **WINDOWS, "tie_word_embeddings": True},
    "qwen3": {**GROUPED, "head_dim": 12},
    "gpt_neox": WIDTHS,  # Pythia
    "mpt": dict(d_model=32, n_heads=4, max_seq_len=32),
}  # fmt: skip


def config_of(family: str, layers: int = 3, **fields):
    """The config of a tiny model."""
    count = {"gpt2": "n_layer", "mpt": "n_layers"}.get(family, "num_hidden_layers")
    sizes = {"vocab_size": 61, count: layers, **CONFIGS[family]}
    return AutoConfig.for_model(family, **{**sizes, **fields})


def gpt2(**fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_positions": 24, "n_embd": 32, "n_layer": 3, "n_head": 4}
    return randomized_(GPT2LMHeadModel(GPT2Config(**sizes | fields)))


def llama_of(config: LlamaConfig):
    torch.manual_seed(0)
    hf_config = HFLlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size or config.hidden_size // config.heads,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_epsilon,
        hidden_act=config.activation,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            **(config.rope_scaling or {}),
        },
    )
    return randomized_(LlamaForCausalLM(hf_config))


def llama(**fields):
    return llama_of(LlamaConfig(**{**LLAMA_SIZES, **fields}))


def mpt(**fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "max_seq_len": 32, "d_model": 32, "n_layers": 3, "n_heads": 4}
    return randomized_(
        MptForCausalLM(
            MptConfig(attn_config={"clip_qkv": 0.5, "softmax_scale": 0.3}, **sizes | fields)
        )
    )


def deep_gpt2(**fields):
    return gpt2(n_layer=5, n_head=8, **fields)


def deep_llama(**fields):
    return llama_of(LlamaConfig(**{**DEEP_LLAMA_SIZES, **fields}))


def deep_mpt(**fields):
    return mpt(n_layers=5, n_heads=8, **fields)


def llama_tensors(hf, config: LlamaConfig) -> dict:
    """transformers' weights under our names; fused parts one after the other."""
    state = hf.state_dict()
    parts = {
        "attention_norm": ["input_layernorm"],
        "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention.output": ["self_attn.o_proj"],
        "mlp_norm": ["post_attention_layernorm"],
        "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down": ["mlp.down_proj"],
    }
    tensors = {
        "embedding.weight": state["model.embed_tokens.weight"],
        "norm.weight": state["model.norm.weight"],
        "head.weight": state["lm_head.weight"],
    }
    for layer in range(config.layers):
        for ours, theirs in parts.items():
            for kind in ("weight", "bias"):
                names = [f"model.layers.{layer}.{name}.{kind}" for name in theirs]
                if names[0] in state:
                    tensors[f"layers.{layer}.{ours}.{kind}"] = torch.cat(
                        [state[name] for name in names]
                    )
    return {name: tensor.clone() for name, tensor in tensors.items()}
