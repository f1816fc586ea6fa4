"""MPT against transformers where that honours the field, else against a plain forward; its training
in layouts."""

import pytest
import torch
import torch.nn.functional as F
from transformers import MptConfig as HFConfig
from transformers import MptForCausalLM

import megazoo
from megazoo.errors import UserError
from megazoo.formats.configs import config_from_hugging_face
from megazoo.layers import alibi_slopes
from megazoo.models.mpt import MPTConfig
from tests.support.training import (
    INFERENCE_LAYOUTS,
    Case,
    assert_outputs_equal,
    inputs_for,
    layout_name,
    randomized_,
    transformers_case,
    world,
)

SIZES = {"vocab_size": 61, "max_positions": 32, "hidden_size": 32, "layers": 3, "heads": 4}
HONOURED = {  # ours, and transformers' fields and attention fields
    "plain": ({}, {}, {}),
    "twelve heads": ({"heads": 12, "hidden_size": 48}, {"n_heads": 12, "d_model": 48}, {}),
    "clipped": ({"clip_qkv": 0.5}, {}, {"clip_qkv": 0.5}),
    "scores' scale": ({"softmax_scale": 0.2}, {}, {"softmax_scale": 0.2}),
    "epsilon, untied": (
        {"norm_epsilon": 1e-2, "tie_embeddings": False},
        {"layer_norm_epsilon": 1e-2, "tie_word_embeddings": False},
        {},
    ),
}
FOUNDRY = {
    "bias_max 16": {"alibi_bias_max": 16.0},
    "learned positions": {"alibi": False},
    "no positions": {"alibi": False, "learned_positions": False},
    "normalised, grouped, clipped, biased": {
        "qk_norm": True,
        "kv_heads": 2,
        "clip_qkv": 1.0,
        "bias": True,
    },
    "normalised queries and keys": {"qk_norm": True},
    "normalised, multi-query": {"qk_norm": True, "kv_heads": 1},
    "normalised, another epsilon": {"qk_norm": True, "kv_heads": 2, "norm_epsilon": 1e-2},
    "biases": {"bias": True},
    "grouped queries": {"kv_heads": 2},
    "logits' scale, inner features": {"logit_scale": 0.3, "ffn_size": 48},
}


def global_tensors(hf):
    """transformers' weights under our names."""
    names = {"transformer.wte": "embedding", "transformer.norm_f": "norm", "lm_head": "head"}
    parts = {
        "norm_1": "attention_norm",
        "attn.Wqkv": "attention.qkv",
        "attn.out_proj": "attention.output",
        "norm_2": "mlp_norm",
        "ffn.up_proj": "mlp.up",
        "ffn.down_proj": "mlp.down",
    }
    names |= {
        f"transformer.blocks.{i}.{k}": f"layers.{i}.{v}" for i in range(3) for k, v in parts.items()
    }
    return {
        f"{names[name[:-7]]}.weight": tensor.clone() for name, tensor in hf.state_dict().items()
    }


def honoured_case(name):
    ours, theirs, attention = HONOURED[name]
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "max_seq_len": 32, "d_model": 32, "n_layers": 3, "n_heads": 4}
    hf = randomized_(
        MptForCausalLM(HFConfig(**{**sizes, **theirs}, attn_config={"alibi": True, **attention}))
    )
    config = config_from_hugging_face(hf.config.to_dict())
    assert config == MPTConfig(**{**SIZES, **ours})
    return transformers_case(
        name, config, hf, global_tensors(hf), inputs_for(32, position_ids=False)
    )


@pytest.fixture(scope="module")
def cases():
    return [honoured_case(name) for name in HONOURED] + [foundry_case(name) for name in FOUNDRY]


def test_logits_and_loss_equal_transformers_or_a_plain_forward(ranks, cases):
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


def plain_forward(weights, c: MPTConfig, input_ids, attention_mask=None, position_ids=None):
    """llm-foundry's meaning, head by head, without any of our layers."""
    size = c.hidden_size // c.heads
    kv_size = size * c.kv_heads

    def get(name):
        return weights.get(name)

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], get(f"{name}.bias"))

    def norm(x, name, epsilon=c.norm_epsilon):
        return F.layer_norm(
            x, x.shape[-1:], weights[f"{name}.weight"], get(f"{name}.bias"), epsilon
        )

    place = torch.arange(input_ids.shape[1])
    hidden = place > place[:, None]
    # a token of padding sees itself, so that its softmax has a value
    if attention_mask is not None:
        hidden = (hidden | (attention_mask[:, None] == 0)) & (place != place[:, None])
    x = weights["embedding.weight"][input_ids]
    if c.learned_positions and not c.alibi:
        x = (
            x
            + weights["position_embedding.weight"][place if position_ids is None else position_ids]
        )
    for i in range(c.layers):
        qkv = linear(norm(x, f"layers.{i}.attention_norm"), f"layers.{i}.attention.qkv")
        if c.clip_qkv:
            qkv = qkv.clamp(-c.clip_qkv, c.clip_qkv)
        q, k, v = qkv.split([c.hidden_size, kv_size, kv_size], dim=-1)
        # llm-foundry's blocks keep norm_eps from them: the attention's own default counts
        if c.qk_norm:
            q, k = (
                norm(q, f"layers.{i}.attention.q_norm", 1e-5),
                norm(k, f"layers.{i}.attention.k_norm", 1e-5),
            )
        heads = []
        for h in range(c.heads):
            kv = h * c.kv_heads // c.heads
            mine, theirs = slice(h * size, (h + 1) * size), slice(kv * size, (kv + 1) * size)
            scores = q[..., mine] @ k[..., theirs].mT * size**-0.5
            if c.alibi:
                scores = scores + 2.0 ** (-(h + 1) * c.alibi_bias_max / c.heads) * (
                    place - place[:, None]
                )
            scores = scores.masked_fill(hidden, -torch.inf)
            heads.append(scores.softmax(-1) @ v[..., theirs])
        x = x + linear(torch.cat(heads, -1), f"layers.{i}.attention.output")
        x = x + linear(
            F.gelu(linear(norm(x, f"layers.{i}.mlp_norm"), f"layers.{i}.mlp.up")),
            f"layers.{i}.mlp.down",
        )
    return norm(x, "norm") @ weights["embedding.weight"].T * (c.logit_scale or 1.0)


@torch.no_grad()
def foundry_case(name):
    config = MPTConfig(**{**SIZES, **FOUNDRY[name]})
    model = randomized_(megazoo.from_config(config))
    weights = {entry.name: entry.parameter.detach().clone() for entry in model.entries()}
    inputs, expected = inputs_for(32, position_ids=not config.alibi), {}
    for kind, arguments in inputs.items():
        logits = plain_forward(
            weights, config, **{k: v for k, v in arguments.items() if k != "labels"}
        )
        loss = None
        if "labels" in arguments:
            loss = F.cross_entropy(
                logits[:, :-1].flatten(0, 1), arguments["labels"][:, 1:].flatten()
            )
        expected[kind] = loss, logits
    return Case(name, config, weights, inputs, expected)


def test_slopes():
    assert alibi_slopes(6).tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(4, 16).tolist() == [2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16]


def test_a_sequence_past_the_models_positions_is_refused():
    with pytest.raises(UserError, match="a sequence of 33 exceeds the model's max-positions 32"):
        megazoo.from_config(MPTConfig(**SIZES))(torch.zeros(1, 33, dtype=torch.long))


def test_the_scale_of_logits_is_none_of_a_classifiers_scores():
    ids, sizes = torch.arange(12).view(2, 6), {**SIZES, "num_labels": 3, "pad_token_id": 60}
    plain = randomized_(megazoo.from_config(MPTConfig(**sizes), seed=1))
    scaled = megazoo.from_config(MPTConfig(**sizes, logit_scale=0.5)).eval()
    scaled.load_state_dict(plain.state_dict())
    assert torch.equal(scaled(ids).logits, plain(ids).logits)
