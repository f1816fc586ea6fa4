"""Tiny models of transformers with random weights: GPT-2, LLaMA and MPT."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, MptConfig, MptForCausalLM
from transformers import LlamaConfig as HFLlamaConfig

from megazoo.models.llama import LlamaConfig
from tests.support.training import randomized_

LLAMA_SIZES = {
    "vocab_size": 61,
    "max_positions": 32,
    "hidden_size": 32,
    "layers": 3,
    "heads": 4,
    "ffn_size": 48,
}
ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3, of the model's context": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn, of the model's context": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "truncate": False,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
    },
    "yarn, of one mscale": {  # 0: none, as configs of DeepSeek have it
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.2,
        "mscale_all_dim": 0.0,
    },
}
DEEP_LLAMA_SIZES = {
    "vocab_size": 61,
    "max_positions": 32,
    "layers": 5,
    "hidden_size": 32,
    "heads": 8,
    "ffn_size": 48,
}


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
