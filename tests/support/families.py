"""Tiny models of the families beside GPT-2, LLaMA and MPT that transformers makes, three of
each."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from tests.support.training import randomized_


class Twin(NamedTuple):
    """A tiny model of transformers.

    kind: the start of its class. seed: of weights with which no two candidates of the tests of
    generation are all but equal, and each row goes on with five different tokens (see
    `python -m tests.support.seeds`). fields: those of its config that differ from COMMON. fast:
    whether `make test` tries it; one of each family. repeats: whether it chooses the same token
    again and again with random weights.
    """

    kind: str
    seed: int
    fields: dict
    fast: bool = False
    repeats: bool = False


COMMON = dict(
    vocab_size=61,
    max_position_embeddings=64,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=48,
    bos_token_id=None,
    eos_token_id=None,
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
QUARTER = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
HALF = {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5}
TWINS = {
    "mistral, window": Twin(
        "Mistral", 13, dict(num_key_value_heads=2, sliding_window=5), fast=True
    ),
    "mistral, wide heads": Twin(
        "Mistral",
        6,
        dict(num_key_value_heads=1, sliding_window=7, head_dim=12, rms_norm_eps=1e-4),
    ),
    "mistral, tied, all tokens": Twin(
        "Mistral",
        1,
        dict(num_key_value_heads=4, sliding_window=None, tie_word_embeddings=True),
    ),
    "qwen2, tied": Twin("Qwen2", 8, dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen2, windows in later layers": Twin(
        "Qwen2",
        13,
        dict(num_key_value_heads=2, use_sliding_window=True, sliding_window=4, max_window_layers=1),
        fast=True,
    ),
    "qwen2, scaled": Twin("Qwen2", 18, dict(num_key_value_heads=4, rope_parameters=LLAMA3)),
    "qwen3, wide heads": Twin("Qwen3", 6, dict(num_key_value_heads=2, head_dim=16), fast=True),
    "qwen3, biases, windows": Twin(
        "Qwen3",
        18,
        dict(
            num_key_value_heads=1,
            head_dim=6,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=6,
            max_window_layers=0,
        ),
    ),
    "qwen3, tied": Twin(
        "Qwen3", 11, dict(num_key_value_heads=4, head_dim=8, tie_word_embeddings=True)
    ),
    "pythia": Twin("GPTNeoX", 74, dict(rope_parameters=QUARTER), fast=True),
    "pythia, one after the other": Twin(
        "GPTNeoX",
        18,
        dict(use_parallel_residual=False, rope_parameters=HALF, hidden_act="gelu_new"),
    ),
    "pythia, tied, no biases": Twin(
        "GPTNeoX",
        6,
        dict(attention_bias=False, tie_word_embeddings=True, rope_parameters=QUARTER),
    ),
}
FULL, WINDOW = "full_attention", "sliding_attention"
BY_LAYER = {
    FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    WINDOW: {"rope_type": "default", "rope_theta": 1e3},
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 5e4,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.1,
}
TWINS |= {
    "gemma2, capped": Twin(
        "Gemma2", 10,
        dict(
            num_key_value_heads=2, head_dim=12, sliding_window=5, query_pre_attn_scalar=10,
            attn_logit_softcapping=5.0, final_logit_softcapping=20.0,
        ), fast=True,
    ),
    "gemma2, biases, no caps": Twin(
        "Gemma2", 2,
        dict(
            num_key_value_heads=1, head_dim=8, sliding_window=7, attention_bias=True,
            attn_logit_softcapping=None, final_logit_softcapping=None,
        ),
    ),
    "gemma2, untied": Twin(
        "Gemma2", 2,
        dict(num_key_value_heads=4, head_dim=8, sliding_window=4, tie_word_embeddings=False),
    ),
    "gemma3, all windows": Twin(
        "Gemma3Text", 10,
        dict(num_key_value_heads=2, head_dim=12, sliding_window=5, query_pre_attn_scalar=10),
    ),
    "gemma3, mixed, capped": Twin(
        "Gemma3Text", 64,
        dict(
            num_key_value_heads=1, head_dim=8, sliding_window=6, final_logit_softcapping=9.0,
            layer_types=[WINDOW, FULL, WINDOW],
        ),
    ),
    "gemma3, scaled": Twin(
        "Gemma3Text", 21,
        dict(
            num_key_value_heads=4, head_dim=16, sliding_window=4, rope_parameters=BY_LAYER,
            layer_types=[WINDOW, FULL, WINDOW],
        ), fast=True,
    ),
    "olmo2, grouped": Twin("Olmo2", 4, dict(num_key_value_heads=2), fast=True),
    "olmo2, one key head, biases": Twin(
        "Olmo2", 59, dict(num_key_value_heads=1, attention_bias=True)
    ),
    "olmo2, tied": Twin("Olmo2", 49, dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "olmo3, all windows": Twin("Olmo3", 1, dict(num_key_value_heads=2, sliding_window=5)),
    "olmo3, mixed, scaled": Twin(
        "Olmo3", 1,
        dict(
            num_key_value_heads=4, sliding_window=6, layer_types=[WINDOW, FULL, WINDOW],
            rope_parameters={FULL: YARN, WINDOW: {"rope_type": "default", "rope_theta": 5e4}},
        ), fast=True,
    ),
    "olmo3, no windows": Twin(
        "Olmo3", 118,
        dict(num_key_value_heads=1, layer_types=[FULL] * 3, attention_bias=True),
    ),
    "phi3, window": Twin("Phi3", 1, dict(num_key_value_heads=2, sliding_window=5)),
    "phi3, half of a head": Twin(
        "Phi3", 1, dict(num_key_value_heads=4, partial_rotary_factor=0.5), fast=True,
    ),
    "phi3, tied": Twin(
        "Phi3", 1,
        dict(num_key_value_heads=1, sliding_window=6, tie_word_embeddings=True, rope_theta=500.0),
    ),
    "bloom": Twin("Bloom", 92, dict(tie_word_embeddings=False), fast=True),
    "bloom, after the norms": Twin(
        "Bloom", 1,
        dict(apply_residual_connection_post_layernorm=True, tie_word_embeddings=False),
        repeats=True,
    ),
    "bloom, six heads, tied": Twin("Bloom", 1, dict(n_head=6, hidden_size=36), repeats=True),
    "falcon, one key head": Twin("Falcon", 63, {}),
    "falcon, new, biases": Twin(
        "Falcon", 57,
        dict(new_decoder_architecture=True, num_kv_heads=2, bias=True), fast=True,
    ),
    "falcon, new, one norm": Twin(
        "Falcon", 6,
        dict(
            new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1,
            tie_word_embeddings=False,
        ),
    ),
    "mixtral": Twin("Mixtral", 8, dict(num_key_value_heads=2, num_local_experts=4), fast=True),
    "mixtral, one of five, window": Twin(
        "Mixtral", 9,
        dict(
            num_key_value_heads=1, num_local_experts=5, num_experts_per_tok=1, sliding_window=5,
            head_dim=12,
        ),
    ),
    "mixtral, four of six, tied": Twin(
        "Mixtral", 1,
        dict(
            num_key_value_heads=4, num_local_experts=6, num_experts_per_tok=4,
            tie_word_embeddings=True,
        ),
    ),
    "qwen2_moe, dense between": Twin(
        "Qwen2Moe", 2,
        dict(
            num_key_value_heads=2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
            shared_expert_intermediate_size=24, decoder_sparse_step=2,
        ), fast=True,
    ),
    "qwen2_moe, first dense": Twin(
        "Qwen2Moe", 6,
        dict(
            num_key_value_heads=4, num_experts=5, num_experts_per_tok=4, moe_intermediate_size=16,
            shared_expert_intermediate_size=40, mlp_only_layers=[0], norm_topk_prob=True,
        ),
    ),
    "qwen2_moe, one of four, tied": Twin(
        "Qwen2Moe", 4,
        dict(
            num_key_value_heads=1, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=24,
            shared_expert_intermediate_size=48, tie_word_embeddings=True,
        ),
    ),
    "qwen3_moe, wide heads": Twin(
        "Qwen3Moe", 36,
        dict(
            num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
            moe_intermediate_size=16, norm_topk_prob=True,
        ), fast=True,
    ),
    "qwen3_moe, window, dense between": Twin(
        "Qwen3Moe", 3,
        dict(
            num_key_value_heads=4, num_experts=6, num_experts_per_tok=4, moe_intermediate_size=24,
            mlp_only_layers=[1], use_sliding_window=True, sliding_window=6, attention_bias=True,
        ),
    ),
    "qwen3_moe, one of four, tied": Twin(
        "Qwen3Moe", 55,
        dict(
            num_key_value_heads=1, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=16,
            tie_word_embeddings=True,
        ),
    ),
    "olmoe": Twin(
        "Olmoe", 1, dict(num_key_value_heads=4, num_experts=8, num_experts_per_tok=2)
    ),
    "olmoe, grouped, normalised": Twin(
        "Olmoe", 1,
        dict(num_key_value_heads=2, num_experts=6, num_experts_per_tok=4, norm_topk_prob=True),
        fast=True,
    ),
    "olmoe, one of four, tied": Twin(
        "Olmoe", 5,
        dict(
            num_key_value_heads=1, num_experts=4, num_experts_per_tok=1, attention_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "stablelm, a quarter of a head": Twin(
        "StableLm", 6, dict(num_key_value_heads=2, use_qkv_bias=True)
    ),
    "stablelm, parallel, norms of heads": Twin(
        "StableLm", 5,
        dict(
            num_key_value_heads=2, use_parallel_residual=True, qk_layernorm=True,
            rope_parameters=HALF,
        ),
        fast=True,
    ),
    "stablelm, norms of one key head": Twin(
        "StableLm", 28,
        dict(
            num_key_value_heads=1, qk_layernorm=True,
            rope_parameters={**BY_LAYER[FULL], "partial_rotary_factor": 0.5},
        ),
    ),
}  # fmt: skip
# The names of some sizes, None for those that the config has not.
OTHER_NAMES = {
    "Bloom": {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": None,
        "intermediate_size": None,
    },
    "Falcon": {"intermediate_size": "ffn_hidden_size"},
}
ONE_OF_EACH = [name for name, twin in TWINS.items() if twin.fast]
# With random weights these choose the same token again and again.
REPEATS = {name for name, twin in TWINS.items() if twin.repeats}


def has_experts(name: str) -> bool:
    """Whether the model is a mixture of experts."""
    return bool({"num_experts", "num_local_experts"} & TWINS[name].fields.keys())


def config_of(name: str, **fields):
    """The config of transformers."""
    kind, own = TWINS[name].kind, TWINS[name].fields
    names = OTHER_NAMES.get(kind, {})
    common = {names.get(key, key): value for key, value in COMMON.items()}
    common.pop(None, None)
    eager = {"attn_implementation": "eager"} if kind == "Gemma2" else {}  # others drop its cap
    balance = {"router_aux_loss_coef": 0.05} if has_experts(name) else {}
    values = {**common, "pad_token_id": None, **eager, **balance, **own, **fields}
    return getattr(transformers, f"{kind}Config")(**values)


def model_class(name: str, head: str = "ForCausalLM"):
    """The class of transformers."""
    kind = TWINS[name].kind
    kind = kind.removesuffix("Text") if head == "ForCausalLM" else kind
    return getattr(transformers, f"{kind}{head}")


@cache
def twin(name: str):
    """The model of transformers, with random biases and norms, too.

    Biases are around 0: around 1 that of the last norm would choose the token alone, the same one
    again and again, whatever came before.
    """
    torch.manual_seed(TWINS[name].seed)
    model = with_small_biases(randomized_(model_class(name)(config_of(name))))
    # otherwise a tied head chooses the last token again and again
    if TWINS[name].kind.startswith("Gemma"):  # it multiplies embeddings by this root
        model.get_input_embeddings().weight.data /= model.config.hidden_size**0.5
    return model


def with_small_biases(hf):
    """A model of `randomized_`, whose biases are around 0 and no longer around 1."""
    for parameter_name, parameter in hf.named_parameters():
        if parameter_name.endswith("bias"):
            parameter.data.sub_(1.0)
    return hf.eval()


def saved(name: str, directory: Path) -> Path:
    """The directory that transformers wrote it to."""
    path = directory / name.replace(" ", "_").replace(",", "")
    if not path.is_dir():
        twin(name).save_pretrained(path)
    return path
