"""LLaMA against transformers, with Hugging Face's weights copied in, and its training in every
layout."""

import pytest
import torch

from megazoo.errors import UserError
from megazoo.formats.configs import config_from_hugging_face
from megazoo.layers import Rotary
from megazoo.models.llama import Llama, LlamaConfig
from megazoo.parallel import ParallelContext
from tests.support.training import (
    INFERENCE_LAYOUTS,
    assert_outputs_equal,
    inputs_for,
    layout_name,
    transformers_case,
    world,
)
from tests.support.transformers_models import LLAMA_SIZES, ROPE, llama_of, llama_tensors, scaled

# In an order in which those with fewer heads of keys than ranks go to layouts of tp 4.
VARIANTS = {
    "plain": {},
    "grouped queries": {"kv_heads": 2},
    "other activation": {"activation": "gelu"},
    "biases": {"attention_bias": True, "mlp_bias": True, "kv_heads": 2},
    "wide heads, tied": {"head_size": 12, "kv_heads": 2, "tie_embeddings": True},
    "multi-query": {"kv_heads": 1},
    "other theta and epsilon": {"rope_theta": 5e5, "norm_epsilon": 1e-2},
    **{f"{name} rotary": {"rope_scaling": scaling} for name, scaling in ROPE.items()},
}


@pytest.fixture(scope="module")
def cases():
    made = []
    for name, variant in VARIANTS.items():
        config = LlamaConfig(**{**LLAMA_SIZES, **variant})
        hf = llama_of(config)
        assert config_from_hugging_face(hf.config.to_dict()) == config
        inputs = inputs_for(32)  # past the original context, for llama3 and yarn
        if Llama.longest_sequence(config) > 32:
            inputs |= {
                f"past the context, {kind}": arguments for kind, arguments in inputs_for(50).items()
            }
        made.append(transformers_case(name, config, hf, llama_tensors(hf, config), inputs))
    return made


def test_logits_and_loss_equal_transformers(ranks, cases):
    assert_outputs_equal(ranks, cases, {})


def test_some_variants_equal_it_in_layouts(ranks, cases):
    """Two in each layout of four ranks."""
    layouts = [layout for layout in INFERENCE_LAYOUTS if world(layout) == 4]
    for number, layout in enumerate(layouts):
        assert_outputs_equal(ranks, cases[number :: len(layouts)][:2], layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", INFERENCE_LAYOUTS[1:], ids=layout_name)
def test_every_variant_equals_it_in_every_layout(ranks, cases, layout):
    assert_outputs_equal(ranks, cases, layout)


def test_scaled_rotary_equals_transformers_past_the_original_context():
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    for name, scaling in ROPE.items():
        config = LlamaConfig(**{**LLAMA_SIZES, "rope_scaling": scaling})
        hf = LlamaRotaryEmbedding(llama_of(config).config)
        positions = torch.arange(100)
        expected = hf(torch.zeros(1), positions[None])
        ours = Rotary(8, config.rope_theta, 32, config.rope_scaling)(positions, torch.float32)
        for a, b in zip(ours, expected, strict=True):
            assert (a - b[0]).abs().max() <= 1e-6, name


LONGEST = [
    (2048, None, 2048),
    (2048, {"rope_type": "default"}, 2048),
    (4096, {"rope_type": "linear", "factor": 4.0}, 16_384),  # vicuna-7b-v1.5-16k
    (4096, {"rope_type": "dynamic", "factor": 2.0}, 8192),
    (32_768, scaled("yarn", 4.0, 32_768), 131_072),  # Qwen2.5
    (40_960, scaled("yarn", 4.0, 32_768), 131_072),  # Qwen3
    (65_536, scaled("yarn", 16.0, 4096), 65_536),
    (4096, {"rope_type": "yarn", "factor": 16.0}, 65_536),
    (131_072, scaled("llama3", 8.0, 8192), 131_072),  # LLaMA 3.1
    (131_072, scaled("llama3", 32.0, 8192), 262_144),  # LLaMA 3.2
    (8192, scaled("llama3", 8.0, 8192), 65_536),
    (8192, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
     65_536),
]  # fmt: skip


def test_the_longest_sequence_is_what_the_scaling_allows():
    for max_positions, scaling, longest in LONGEST:
        sizes = {**LLAMA_SIZES, "max_positions": max_positions, "rope_scaling": scaling}
        assert Llama.longest_sequence(LlamaConfig(**sizes)) == longest, (max_positions, scaling)


REFUSED = [
    ({"kv_heads": 3}, 1, "heads 4 is not divisible by kv-heads 3"),
    (
        {"hidden_size": 64, "heads": 32, "kv_heads": 8},
        6,
        "heads 32 with kv-heads 8 can't be sharded over tp 6: use tp 1, 2, 3, 4, 5, 8, 16 or 32",
    ),
    ({"kv_heads": 2}, 3, "heads 4 with kv-heads 2 can't be sharded over tp 3: use tp 1, 2 or 4"),
    (
        {"rope_scaling": {"rope_type": "longrope"}},
        1,
        "rope_type 'longrope' is not supported: use default",
    ),
]


def test_what_is_not_supported_is_refused():
    for overrides, tp, message in REFUSED:
        config = LlamaConfig(**{**LLAMA_SIZES, **overrides})
        with pytest.raises(UserError, match=message):
            Llama.on_meta(config, ParallelContext.virtual(tp))
