"""config.json of Mistral, Qwen2, Qwen3 and Pythia, in random forms: read as transformers reads it,
or refused in one line."""

import json
import random

import pytest
import torch
import transformers

import megazoo
from megazoo.errors import Advice, UserError
from megazoo.families.registry import config_from_dict
from megazoo.formats.configs import config_from_hugging_face
from tests.support.families import COMMON

IDS = torch.randint(0, 61, (2, 21), generator=torch.Generator().manual_seed(2))
FULL, WINDOW = "full_attention", "sliding_attention"
ROTARY = [
    {},
    {"rope_type": "default"},
    {"rope_theta": 5e3},
    {"rope_type": "default", "rope_theta": 700},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
]
EVERY = {
    "rope_parameters": [None, *ROTARY],
    "rope_scaling": [None, *ROTARY],
    "rope_theta": [1e6, 500],
    "partial_rotary_factor": [None, 0.5, 1.0],
    "tie_word_embeddings": [True, False],
    "hidden_act": ["silu", "gelu", "relu", "gelu_new"],
    "attention_bias": [True, False],
    "attention_dropout": [0.0, 0.1],
    "head_dim": [7, 8, 12, 16],
    "max_position_embeddings": [32, 64],
    "num_key_value_heads": [1, 2, 4],
    "sliding_window": [None, 0, -1, 1, 4, 9, 4096],
}
LLAMAS = {**EVERY, "rms_norm_eps": [1e-6, 1e-2]}
QWENS = {
    **LLAMAS,
    "use_sliding_window": [True, True, False],
    "max_window_layers": [0, 1, 2, 3, 28, -1],
    "layer_types": [
        None,
        [FULL] * 3,
        [WINDOW] * 3,
        [FULL, WINDOW, WINDOW],
        [WINDOW, FULL, FULL],
        [FULL] * 2,
    ],
}
NEOX = {
    **EVERY,
    "layer_norm_eps": [1e-2],
    "rotary_pct": [0.1, 0.13, 0.25, 0.3, 0.5, 1.0],
    "rotary_emb_base": [500, 10000],
    "use_parallel_residual": [True, False],
    "hidden_dropout": [0.0, 0.1],
}
PATTERNS = {
    **LLAMAS,
    "layer_types": [None, [FULL] * 3, [WINDOW] * 3, [WINDOW, FULL, WINDOW], [FULL, WINDOW, FULL]],
    "sliding_window": [None, 1, 4, 9, 4096],
}
BY_LAYER = {
    "rope_parameters": [None, {FULL: {"rope_type": "linear", "factor": 2.0}}, {"rope_theta": 9.0}],
    "rope_scaling": [None, {"rope_type": "linear", "factor": 2.0}],
    "rope_theta": [1e6, 500.0],
}
GEMMA = {
    **PATTERNS,
    "hidden_activation": ["gelu", "silu"],
    "query_pre_attn_scalar": [3, 16],
    "final_logit_softcapping": [None, 2.0],
    "use_bidirectional_attention": [None, False],
}
FALCON = {
    "alibi": [False, True],
    "bias": [True],
    "new_decoder_architecture": [True, True, False],
    "multi_query": [True, False],
    "parallel_attn": [True, True, False],
    "num_kv_heads": [1, 2, 4],
    "num_ln_in_parallel_attn": [None, 1, 2],
    "ffn_hidden_size": [20, None],
    "activation": ["relu", "gelu"],
    "layer_norm_epsilon": [1e-2],
    "rope_theta": [500.0],
    "tie_word_embeddings": [True, False],
}
BLOOM = {
    "n_head": [2, 4],
    "n_layer": [1, 2],
    "layer_norm_epsilon": [1e-2],
    "apply_residual_connection_post_layernorm": [True, False],
    "hidden_dropout": [0.1],
    "tie_word_embeddings": [True, False],
    "slow_but_exact": [False, True],
    "pretraining_tp": [1, 2],
}
PHI = {
    **LLAMAS,
    "partial_rotary_factor": [0.5, 1.0],
    "resid_pdrop": [0.1],
    "original_max_position_embeddings": [16],
    "embd_pdrop": [0.1],
}
STABLE = {
    **EVERY,
    "layer_norm_eps": [1e-2],
    "partial_rotary_factor": [0.13, 0.25, 0.5, 1.0],
    "use_qkv_bias": [True, False],
    "qk_layernorm": [True, False],
    "use_parallel_residual": [True, False],
    "hidden_dropout": [0.0, 0.1],
}
EXPERTS = {
    "num_experts_per_tok": [1, 2, 4, 5],
    "num_experts": [4, 5],
    "num_local_experts": [4],
    "router_aux_loss_coef": [0.1],
    "output_router_logits": [False],
    "router_jitter_noise": [0.0, 0.1],
}
QWEN_EXPERTS = {
    **EXPERTS,
    "moe_intermediate_size": [12, 16],
    "norm_topk_prob": [True, False],
    "decoder_sparse_step": [1, 2],
    "mlp_only_layers": [None, [], [0], [1, 2]],
    "shared_expert_intermediate_size": [24],
}
FIELDS = {
    "mistral": LLAMAS, "qwen2": QWENS, "qwen3": QWENS, "gpt_neox": NEOX, "olmo2": LLAMAS,
    "olmo3": PATTERNS | BY_LAYER, "gemma2": GEMMA | {"attn_logit_softcapping": [None, 2.0]},
    "gemma3_text": GEMMA | BY_LAYER | {"rope_local_base_freq": [5e2]},
    "phi3": PHI, "bloom": BLOOM, "falcon": FALCON, "stablelm": STABLE, "mixtral": LLAMAS | EXPERTS,
    "qwen2_moe": QWENS | QWEN_EXPERTS, "qwen3_moe": QWENS | QWEN_EXPERTS,
    "olmoe": LLAMAS | EXPERTS | {"clip_qkv": [None, 5.0], "norm_topk_prob": [True, False]},
}  # fmt: skip
NO_KV_HEADS = ("gpt_neox", "bloom", "falcon")
UNREAD = ["mlp_bias", "logit_scale", "num_experts", "attention_sink", "rope_interleaved"]


def random_values(family: str, rng: random.Random) -> dict:
    """A config.json with up to five fields of its own."""
    values = {"model_type": family, **COMMON, "pad_token_id": None}
    if family == "bloom":
        values = {k: v for k, v in values.items() if not k.startswith(("max_", "inter"))}
    if family == "falcon":
        values["ffn_hidden_size"] = values.pop("intermediate_size")
    if family == "gemma2":
        values["attn_implementation"] = "eager"
    if family == "mixtral":  # dynamic scaling of transformers fails without it
        values["head_dim"] = 8
    if family not in NO_KV_HEADS:
        values["num_key_value_heads"] = 2
    for name in rng.sample(list(FIELDS[family]), rng.randint(1, 5)):
        values[name] = rng.choice(FIELDS[family][name])
    return values


def logits_of_transformers(path, values) -> torch.Tensor | None:
    """What transformers makes of a config.json; the weights are then there, too. None if it makes
    nothing of it."""
    (path / "config.json").write_text(json.dumps(values))
    torch.manual_seed(1)
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        hf = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in hf.parameters():
            mean = parameter.dim() == 1 and not values["model_type"].startswith(
                "gemma"
            )  # 1 + weight
            torch.nn.init.normal_(parameter, mean=float(mean), std=0.3)
        with torch.no_grad():
            logits = hf(IDS).logits
    except Exception:  # of many kinds: its validation, torch, a division by zero
        return None
    hf.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(values))
    return logits if logits.isfinite().all() else None


@pytest.mark.parametrize(
    ("family", "seed", "cases"),
    [(family, *((3, 2) if "_moe" in family else (8, 5))) for family in FIELDS]
    + [pytest.param(family, 300, 300, marks=pytest.mark.slow) for family in FIELDS],
)
def test_random_configs_are_read_as_transformers_reads_them(family, seed, cases, tmp_path):
    rng, refusals, same = random.Random(f"{family}, {seed}"), [], 0
    for case in range(cases):
        path = tmp_path / str(case)
        path.mkdir()
        values = random_values(family, rng)
        expected = logits_of_transformers(path, values)
        try:
            config_from_hugging_face(dict(values))
        except UserError as error:
            refusals.append(str(error))
            continue
        assert expected is not None, f"transformers makes nothing of {values}"
        with torch.no_grad():
            logits = megazoo.from_pretrained(path).eval()(IDS).logits
        worst = (logits - expected).abs().max()
        assert worst < 1e-5 * max(1, expected.abs().max()), values
        same += 1
    assert same > cases / 6
    assert not any("\n" in refusal for refusal in refusals)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_every_field_of_windows_that_are_on_is_used(family):
    values = {**COMMON, "model_type": family, "num_key_value_heads": 2}
    values |= {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    base = config_from_hugging_face(dict(values))
    assert (base.window, base.full_layers) == (6, 1)
    others = {
        "use_sliding_window": False,
        "sliding_window": 7,
        "max_window_layers": 2,
        "layer_types": [FULL, FULL, WINDOW],
    }
    for name, other in others.items():
        assert config_from_hugging_face({**values, name: other}) != base, name


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_no_layer_are_none(family):
    """The first layers that see all may be more than there are."""
    values = {**COMMON, "model_type": family, "num_key_value_heads": 2}
    values |= {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 28}
    assert set(transformers.AutoConfig.for_model(**values).layer_types) == {FULL}
    for more in ({}, {"layer_types": [FULL] * values["num_hidden_layers"]}):
        config = config_from_hugging_face(values | more)
        assert (config.window, config.full_layers) == (0, 0)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_what_is_written_of_windows_is_read_by_transformers(family):
    """Also of a model with fewer layers than the first ones, which then have no window."""
    for full_layers in (-1, 0, 2, 3, 5):
        check_windows(family, full_layers)


def check_windows(family, full_layers):
    sizes = {"vocab_size": 61, "hidden_size": 32, "layers": 3, "heads": 4, "ffn_size": 48}
    own = {"kv_heads": 2, "window": 6, "full_layers": full_layers}
    config = config_from_dict(family, {**sizes, **own})
    written = config.to_hugging_face()
    theirs = transformers.AutoConfig.for_model(**written)
    model = megazoo.from_config(config)
    windows = [layer.attention.window for layer in model.layers.values()]
    expected = [WINDOW if window else FULL for window in windows]
    assert theirs.layer_types == expected, full_layers
    assert theirs.sliding_window == 6
    again = megazoo.from_config(config_from_hugging_face(written))
    assert [layer.attention.window for layer in again.layers.values()] == windows, full_layers


FLAT = ["mistral", "qwen2", "qwen3", "gpt_neox", "olmo2", "gemma2", "phi3"]  # one rope_parameters


@pytest.mark.parametrize("family", FLAT)
def test_every_field_of_rotary_positions_is_used_or_refused(family):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    rope |= {"partial_rotary_factor": 0.5} if family == "gpt_neox" else {}
    values = {**COMMON, "model_type": family, "rope_parameters": rope}
    values |= {} if family == "gpt_neox" else {"num_key_value_heads": 2}
    base = config_from_hugging_face(dict(values))
    assert (
        config_from_hugging_face({**values, "rope_parameters": {**rope, "rope_theta": 9}}) != base
    )
    others = {"partial_rotary_factor": 0.25, "rope_type": "longrope"}
    for name, other in others.items():
        changed = {**values, "rope_parameters": {**rope, name: other}}
        try:
            assert config_from_hugging_face(changed) != base, name
        except UserError as error:
            assert name in str(error)  # noqa: PT017


def test_fields_that_no_code_reads_are_ignored_with_one_warning():
    for family in FLAT:
        values = {**COMMON, "model_type": family}
        values |= {} if family == "gpt_neox" else {"num_key_value_heads": 2}
        unread = [name for name in UNREAD if (family, name) != ("llama", "mlp_bias")]
        with pytest.warns(Advice) as told:
            read = config_from_hugging_face({**values, **dict.fromkeys(unread, 7)}, "a file")
        assert read == config_from_hugging_face(values)
        expected = f"a file: ignored {', '.join(sorted(unread))}, which {family} does not read"
        assert [str(each.message) for each in told] == [expected]
        with pytest.raises(UserError, match="is_causal False is not supported"):
            config_from_hugging_face({**values, "is_causal": False})
