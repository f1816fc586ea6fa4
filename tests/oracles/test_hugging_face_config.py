"""Hugging Face's config.json: what is read, and the one line for what is not supported. Good ones:
tests of models."""

import json
from dataclasses import replace

import pytest

import megazoo
from megazoo.errors import UserError
from megazoo.formats.configs import config_from_hugging_face
from megazoo.models.gpt2 import GPT2Config
from megazoo.models.llama import LlamaConfig
from megazoo.models.mpt import MPTConfig

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MPT = {"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4}
MPT |= {"max_seq_len": 32, "vocab_size": 61}


REFUSED = [
    ({**GPT2, "activation_function": "mish"},
     "activation 'mish' is not supported: use gelu_new"),
    ({**GPT2, "add_cross_attention": True},
     "add_cross_attention True is not supported: it must be False"),
    ({**GPT2, "n_head": 5}, "hidden-size 64 is not divisible by heads 5"),
    ({**GPT2, "n_head": "4"}, "n_head is '4', not of the type int"),
    ({**GPT2, "n_layer": 0}, "layers 0 must be at least 1"),
    ({**LLAMA, "num_key_value_heads": 3}, "heads 4 is not divisible by kv-heads 3"),
    ({**LLAMA, "rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
     "rope_type 'longrope' is not supported: use default, linear"),
    ({**LLAMA, "rope_scaling": {"type": "su"}}, "rope_type 'su' is not supported"),
    ({**LLAMA, "rope_scaling": {"type": "linear"}},
     "rope_type 'linear' requires a number for factor"),
    ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2},
     "rope_type 'dynamic' needs at least 4 rotated features per head, got 2"),
    ({**LLAMA, "partial_rotary_factor": 0.5},
     "partial_rotary_factor 0.5 is not supported: it must be 1.0"),
    ({**LLAMA, "sliding_window": 4096}, "sliding_window 4096 is not supported"),
    ({**LLAMA, "head_dim": 7}, "rotary positions need an even head size, got 7"),
    ({**MPT, "norm_type": "rmsnorm"},
     "norm_type 'rmsnorm' is not supported: it must be 'low_precision_layernorm'"),
    ({**MPT, "attn_config": {"prefix_lm": True}},
     "attn_config.prefix_lm True is not supported: it must be False"),
    ({**MPT, "attn_config": {"attn_uses_sequence_id": True}},
     "attn_config.attn_uses_sequence_id True is not"),
    ({**MPT, "attn_config": {"rope": True}}, "attn_config.rope True is not supported"),
    ({**MPT, "attn_config": {"attn_type": "linear"}},
     "attn_config.attn_type 'linear' is not supported"),
    ({**MPT, "ffn_config": {"ffn_type": "mptglu"}},
     "ffn_config.ffn_type 'mptglu' is not supported"),
    ({**MPT, "embedding_fraction": 0.5}, "embedding_fraction 0.5 is not supported"),
    ({**MPT, "attn_config": {"nope": True}},
     "attn_config.nope True is not supported: it must be False"),
    ({**MPT, "attn_config": {"attn_temperature_tuning": {"attn_scale": 0.1, "floor_scale": 8192}}},
     "attn_config.attn_temperature_tuning.attn_scale 0.1 is not supported: it must be 0.0"),
    ({**MPT, "attn_config": {"attn_logit_softcapping": 30.0}},
     "attn_config.attn_logit_softcapping 30.0 is not"),
    ({**MPT, "attn_config": {"kv_dim": 32}}, "attn_config.kv_dim 32 is not supported"),
    ({**MPT, "attn_config": {"reuse_kv_layer_idx": -1}},
     "attn_config.reuse_kv_layer_idx -1 is not supported"),
    ({**MPT, "attn_config": {"sliding_window_size": 9}},
     "attn_config.sliding_window_size 9 is not supported"),
    ({**MPT, "no_bias": True, "attention_bias": True},
     "attention_bias True is not supported: it must be False"),
    ({**MPT, "no_bias": False, "attn_config": {"attention_bias": False}},
     "attn_config.attention_bias False is"),
    ({**MPT, "head_dim": 32}, "head_dim 32 is not supported: it must be 16"),
    ({**MPT, "block_overrides": {"order": []}}, "block_overrides {'order': []} is not supported"),
    ({"model_type": "bert"}, "model_type 'bert' is not supported; supported: bloom, falcon"),
    ({"model_type": "mpt"}, "the config has no vocab_size"),
]  # fmt: skip


def test_what_is_not_supported_is_refused_by_name_and_value():
    for fields, message in REFUSED:
        with pytest.raises(UserError) as refused:
            config_from_hugging_face(fields)
        assert str(refused.value).startswith(message), message
        assert "\n" not in str(refused.value), message


def test_the_older_form_of_rotary_scaling():
    fields = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    config = config_from_hugging_face(fields)
    assert (config.rope_theta, config.rope_scaling) == (
        5e5,
        {"rope_type": "dynamic", "factor": 2.0},
    )
    newer = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
    # rope_scaling wins
    assert config_from_hugging_face({**fields, "rope_parameters": newer}) == config
    both = {
        **LLAMA,
        "rope_scaling": {"type": "linear", "rope_type": "llama3", "rope_theta": 2e4, "factor": 8.0},
    }
    both["rope_scaling"] |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = config_from_hugging_face(both)
    assert (config.rope_theta, config.rope_scaling["rope_type"]) == (2e4, "llama3")


def test_llm_foundrys_own_fields():
    attention = {"attn_type": "grouped_query_attention", "kv_n_heads": 2, "alibi": False}
    attention |= {"qk_ln": True, "clip_qkv": 0}
    fields = {**MPT, "attn_config": attention, "norm_eps": 1e-6}
    fields |= {"expansion_ratio": 2.5, "no_bias": False}
    config = config_from_hugging_face(
        {**fields, "logit_scale": "inv_sqrt_d_model", "ffn_config": {"ffn_type": "mptmlp"}}
    )
    assert (config.kv_heads, config.alibi, config.qk_norm) == (2, False, True)
    assert (config.clip_qkv, config.norm_epsilon, config.ffn_size) == (None, 1e-6, 160)
    assert (config.bias, config.logit_scale) == (True, 0.125)
    multiquery = config_from_hugging_face(
        {**MPT, "attn_config": {"attn_type": "multiquery_attention"}}
    )
    assert (multiquery.kv_heads, multiquery.alibi, multiquery.bias) == (1, True, False)


# What llm-foundry 0.22's MPTConfig.save_pretrained writes, whole.
FOUNDRY = """
{"attention_bias": false, "attn_config": {"alibi": true, "alibi_bias_max": 8, "attn_impl":
"torch", "attn_logit_softcapping": null, "attn_pdrop": 0.0, "attn_temperature_tuning":
{"attn_scale": 0.0, "floor_scale": 8192}, "attn_type": "multihead_attention",
"attn_uses_sequence_id": false, "clip_qkv": null, "fused_qkv": true, "kv_dim": null, "nope":
false, "qk_gn": false, "qk_ln": true, "rope": false, "rope_dail_config": {"pos_idx_in_fp32":
true, "type": "original", "xpos_scale_base": 512}, "rope_hf_config": {"factor": 1.0, "type":
"no_scaling"}, "rope_impl": "dail", "rope_theta": 10000, "sliding_window_size": -1,
"softmax_scale": null}, "block_overrides": null, "d_model": 64, "emb_pdrop": 0.0,
"embedding_fraction": 1.0, "expansion_ratio": 4, "fc_type": {"name": "torch"}, "ffn_config":
{"fc_type": {"name": "torch"}, "ffn_type": "mptmlp"}, "final_logit_softcapping": null,
"head_dim": null, "init_config": {"emb_init_std": null, "emb_init_uniform_lim": null,
"fan_mode": "fan_in", "init_div_is_residual": true, "init_gain": 0.0, "init_nonlinearity":
"relu", "init_std": null, "name": "kaiming_normal_"}, "init_device": "cpu", "learned_pos_emb":
false, "logit_scale": null, "max_seq_len": 32, "model_type": "mpt", "n_heads": 4, "n_layers": 2,
"no_bias": true, "norm_eps": 1e-05, "norm_type": "low_precision_layernorm", "resid_pdrop": 0.0,
"tie_word_embeddings": true, "transformers_version": "4.51.3", "use_cache": false,
"use_pad_tok_in_ffn": true, "vocab_size": 61}"""


def test_a_config_as_llm_foundry_writes_it():
    expected = MPTConfig(61, 32, 64, 2, 4, qk_norm=True, learned_positions=False)
    assert config_from_hugging_face(json.loads(FOUNDRY)) == expected
    biased = json.loads(FOUNDRY) | {"no_bias": False, "attention_bias": True, "head_dim": 16}
    assert config_from_hugging_face(biased) == replace(expected, bias=True)


def test_config_files(tmp_path):
    theirs, ours, toml = tmp_path / "config.json", tmp_path / "ours.json", tmp_path / "model.toml"
    theirs.write_text(
        json.dumps(
            {**GPT2, "vocab_size": 61, "n_positions": 16, "_name_or_path": "x", "dtype": "float32"}
        )
    )
    assert megazoo.from_config(str(theirs)).config == GPT2Config(61, 16, 64, 2, 4)
    ours.write_text(
        '{"model": "gpt2", "vocab_size": 61, "hidden_size": 32, "layers": 1, "heads": 2}'
    )
    assert megazoo.from_config(str(ours)).config.hidden_size == 32
    toml.write_text(
        'model = "llama"\nhidden_size = 64\nlayers = 1\nheads = 2\nffn_size = 96\nvocab_size = 61\n'
    )
    assert megazoo.from_config(str(toml)).config == LlamaConfig(61, 2048, 64, 1, 2, ffn_size=96)
    toml.write_text('model = "llama"\nhiden_size = 64\n')
    with pytest.raises(UserError, match="unknown llama setting 'hiden_size'"):
        megazoo.from_config(str(toml))
    theirs.write_text("{")
    with pytest.raises(UserError, match=r"config\.json can't be read"):
        megazoo.from_config(str(theirs))
    with pytest.raises(UserError, match=r"nothing\.json: No such file"):
        megazoo.from_config(str(tmp_path / "nothing.json"))
