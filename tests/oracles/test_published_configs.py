"""config.json of published models, with the fields of their files on the hub, are the presets."""

import pytest

from megazoo.formats.configs import config_from_hugging_face
from megazoo.models.registry import find_config

NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
OLMO = dict(
    attention_bias=False, attention_dropout=0.0, hidden_act="silu", rms_norm_eps=1e-6,
    rope_theta=500000, tie_word_embeddings=False, hidden_size=4096, intermediate_size=11008,
    num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32,
)  # fmt: skip
GEMMA = dict(
    attention_bias=False, attention_dropout=0.0, cache_implementation="hybrid", head_dim=256,
    hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, rms_norm_eps=1e-6,
    num_hidden_layers=26, initializer_range=0.02, use_cache=True, eos_token_id=1,
)  # fmt: skip
PHI = dict(
    attention_bias=False, attention_dropout=0.0, embd_pdrop=0.0, resid_pdrop=0.0, hidden_act="silu",
    rms_norm_eps=1e-5, rope_scaling=None, tie_word_embeddings=False, auto_map={"AutoConfig": "x.y"},
)  # fmt: skip
FALCON = dict(
    alibi=False, apply_residual_connection_post_layernorm=False, bias=False, multi_query=True,
    parallel_attn=True, vocab_size=65024, layer_norm_epsilon=1e-5, **NO_DROPOUT,
)  # fmt: skip
STABLE = dict(
    model_type="stablelm", hidden_act="silu", initializer_range=0.02, layer_norm_eps=1e-5,
    max_position_embeddings=4096, num_attention_heads=32, partial_rotary_factor=0.25,
    rope_theta=10000, tie_word_embeddings=False,
)  # fmt: skip
FILES = {
    "stablelm-3b": dict(
        **STABLE, hidden_size=2560, intermediate_size=6912, num_hidden_layers=32,
        num_key_value_heads=32, use_qkv_bias=False, vocab_size=50304,
    ),
    "stablelm2-12b": dict(
        **STABLE, **NO_DROPOUT, hidden_size=5120, intermediate_size=13824, num_hidden_layers=40,
        num_key_value_heads=8, qk_layernorm=True, rope_scaling=None, use_parallel_residual=True,
        use_qkv_bias=False, vocab_size=100352,
    ),
    "gemma2-2b": dict(
        model_type="gemma2", **GEMMA, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
        hidden_act="gelu_pytorch_tanh", hidden_size=2304, intermediate_size=9216,
        max_position_embeddings=8192, num_attention_heads=8, num_key_value_heads=4,
        rope_theta=10000.0, sliding_window=4096, vocab_size=256000,
    ),
    "gemma3-1b": dict(
        model_type="gemma3_text", **GEMMA, attn_logit_softcapping=None,
        final_logit_softcapping=None, hidden_size=1152, intermediate_size=6912,
        max_position_embeddings=32768, num_attention_heads=4, num_key_value_heads=1,
        rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=512,
        sliding_window_pattern=6, vocab_size=262144,
    ),
    "olmo2-7b": dict(
        model_type="olmo2", **OLMO, max_position_embeddings=4096, rope_scaling=None,
        vocab_size=100352,
    ),
    "olmo3-7b": dict(
        model_type="olmo3", **OLMO, max_position_embeddings=65536, sliding_window=4096,
        vocab_size=100278, layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
        rope_scaling=dict(
            attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0, factor=8.0,
            original_max_position_embeddings=8192, rope_type="yarn",
        ),
    ),
    "phi3-mini": dict(
        model_type="phi3", **PHI, hidden_size=3072, intermediate_size=8192, rope_theta=10000.0,
        max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=32,
        num_key_value_heads=32, original_max_position_embeddings=4096, sliding_window=2047,
        vocab_size=32064,
    ),
    "phi4": dict(
        model_type="phi3", **PHI, hidden_size=5120, intermediate_size=17920, rope_theta=250000,
        max_position_embeddings=16384, num_attention_heads=40, num_hidden_layers=40,
        num_key_value_heads=10, original_max_position_embeddings=16384, sliding_window=None,
        vocab_size=100352,
    ),
    "bloom-560m": dict(
        model_type="bloom", apply_residual_connection_post_layernorm=False, n_inner=None,
        attention_softmax_in_fp32=True, bias_dropout_fusion=True, masked_softmax_fusion=True,
        hidden_size=1024, layer_norm_epsilon=1e-5, n_layer=24, num_attention_heads=16,
        offset_alibi=100, pretraining_tp=1, seq_length=2048, skip_bias_add=True,
        skip_bias_add_qkv=False, slow_but_exact=False, vocab_size=250880, **NO_DROPOUT,
    ),
    "falcon-7b": dict(
        model_type="falcon", **FALCON, hidden_size=4544, new_decoder_architecture=False,
        num_attention_heads=71, num_hidden_layers=32,
    ),
    "falcon-40b": dict(
        model_type="falcon", **FALCON, hidden_size=8192, new_decoder_architecture=True,
        num_attention_heads=128, num_hidden_layers=60, num_kv_heads=8,
    ),
    "neox-20b": dict(
        model_type="gpt_neox", attention_probs_dropout_prob=0, hidden_dropout_prob=0,
        hidden_act="gelu_fast", hidden_size=6144, intermediate_size=24576, layer_norm_eps=1e-5,
        max_position_embeddings=2048, num_attention_heads=64, num_hidden_layers=44,
        rotary_emb_base=10000, rotary_pct=0.25, tie_word_embeddings=False, vocab_size=50432,
    ),
    "mixtral-8x7b": dict(
        model_type="mixtral", attention_dropout=0.0, hidden_act="silu", hidden_size=4096,
        intermediate_size=14336, max_position_embeddings=32768, num_attention_heads=32,
        num_experts_per_tok=2, num_hidden_layers=32, num_key_value_heads=8, num_local_experts=8,
        output_router_logits=False, rms_norm_eps=1e-5, rope_theta=1e6, router_aux_loss_coef=0.02,
        sliding_window=None, tie_word_embeddings=False, vocab_size=32000,
    ),
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe", attention_bias=False, attention_dropout=0.0, head_dim=128,
        decoder_sparse_step=1, hidden_act="silu", hidden_size=2048, intermediate_size=6144,
        max_position_embeddings=40960, max_window_layers=48, mlp_only_layers=[],
        moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32, num_experts=128,
        num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4,
        output_router_logits=False, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1e6,
        router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False,
        use_sliding_window=False, vocab_size=151936,
    ),
    "qwen1.5-moe-a2.7b": dict(
        model_type="qwen2_moe", attention_dropout=0.0, decoder_sparse_step=1, hidden_act="silu",
        hidden_size=2048, intermediate_size=5632, max_position_embeddings=8192,
        max_window_layers=21, moe_intermediate_size=1408, norm_topk_prob=False,
        num_attention_heads=16, num_experts=60, num_experts_per_tok=4, num_hidden_layers=24,
        num_key_value_heads=16, output_router_logits=False, rms_norm_eps=1e-6, rope_theta=1e6,
        router_aux_loss_coef=0.001, shared_expert_intermediate_size=5632, sliding_window=32768,
        tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936,
    ),
    "olmoe-1b-7b": dict(
        model_type="olmoe", attention_bias=False, attention_dropout=0.0, clip_qkv=None,
        hidden_act="silu", hidden_size=2048, intermediate_size=1024, max_position_embeddings=4096,
        norm_topk_prob=False, num_attention_heads=16, num_experts=64, num_experts_per_tok=8,
        num_hidden_layers=16, num_key_value_heads=16, output_router_logits=False,
        rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0, router_aux_loss_coef=0.01,
        tie_word_embeddings=False, vocab_size=50304,
    ),
}  # fmt: skip


@pytest.mark.parametrize("preset", FILES)
def test_a_published_file_is_its_preset(preset):
    assert config_from_hugging_face(dict(FILES[preset])) == find_config(preset)
