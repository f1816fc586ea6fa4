"""GPT-2 against transformers, with Hugging Face's weights copied in."""

import pytest
import torch

import megazoo
from megazoo.errors import UserError
from megazoo.formats.configs import config_from_hugging_face
from megazoo.models.gpt2 import GPT2, GPT2Config
from megazoo.models.registry import find_config
from megazoo.parallel import ParallelContext
from tests.support.training import (
    INFERENCE_LAYOUTS,
    assert_outputs_equal,
    inputs_for,
    layout_name,
    transformers_case,
    world,
)
from tests.support.transformers_models import gpt2

SIZES = {"vocab_size": 61, "max_positions": 24, "hidden_size": 32, "layers": 3, "heads": 4}


def global_tensors(hf):
    """transformers' weights under our names. Conv1D stores [in, out]."""
    names = {
        "embedding.weight": "transformer.wte.weight",
        "position_embedding.weight": "transformer.wpe.weight",
        "norm.weight": "transformer.ln_f.weight",
        "norm.bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
    }
    parts = {
        "attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    }  # fmt: skip
    for layer in range(3):
        for ours, theirs in parts.items():
            for kind in ("weight", "bias"):
                names[f"layers.{layer}.{ours}.{kind}"] = f"transformer.h.{layer}.{theirs}.{kind}"
    state = hf.state_dict()
    transposed = {
        theirs for theirs in names.values() if ".c_" in theirs and theirs.endswith("weight")
    }
    tensors = {
        ours: state[theirs].T if theirs in transposed else state[theirs]
        for ours, theirs in names.items()
    }
    return {name: tensor.clone() for name, tensor in tensors.items()}


def token_ids():
    return torch.randint(0, 61, (3, 24), generator=torch.Generator().manual_seed(5))


VARIANTS = {  # ours, and transformers' fields
    "tied": ({}, {}),
    "untied": ({"tie_embeddings": False}, {"tie_word_embeddings": False}),
    "unscaled scores": ({"scale_attention": False}, {"scale_attn_weights": False}),
    "scores over the layer": (
        {"scale_by_inverse_layer": True},
        {"scale_attn_by_inverse_layer_idx": True},
    ),
    "inner features, epsilon": (
        {"ffn_size": 40, "layer_norm_epsilon": 1e-2},
        {"n_inner": 40, "layer_norm_epsilon": 1e-2},
    ),
    **{
        name: ({"activation": name}, {"activation_function": name})
        for name in ("gelu_fast", "gelu_pytorch_tanh", "gelu", "relu", "silu", "swish", "tanh")
    },
}


@pytest.fixture(scope="module")
def cases():
    made = []
    for name, (ours, theirs) in VARIANTS.items():
        hf = gpt2(**theirs)
        config = config_from_hugging_face(hf.config.to_dict())
        assert config == GPT2Config(**SIZES, **ours)
        made.append(transformers_case(name, config, hf, global_tensors(hf), inputs_for(24)))
    return made


def test_logits_and_loss_equal_transformers(ranks, cases):
    assert_outputs_equal(ranks, cases, {})


@pytest.mark.slow
def test_every_variant_equals_it_in_one_of_the_layouts(ranks, cases):
    """Of at most four ranks."""
    layouts = [layout for layout in INFERENCE_LAYOUTS if world(layout) == 4]
    for number, layout in enumerate(layouts):
        assert_outputs_equal(ranks, cases[number :: len(layouts)], layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", INFERENCE_LAYOUTS[1:], ids=layout_name)
def test_every_variant_equals_it_in_every_layout(ranks, cases, layout):
    assert_outputs_equal(ranks, cases, layout)


def test_loss_of_masked_labels_equals_transformers():
    hf = gpt2()
    ids = token_ids()
    labels = ids.masked_fill(ids % 3 == 0, -100)
    model = megazoo.from_config(GPT2Config(**SIZES)).eval()
    weights = global_tensors(hf)
    with torch.no_grad():
        for entry in model.entries():
            entry.parameter.copy_(weights[entry.name])
        assert abs(model(ids, labels=labels).loss - hf(ids, labels=labels).loss) < 1e-5


def test_stages_are_balanced_by_the_cost_of_their_ends():
    # gpt2-124m: the head costs as much as five layers, so the last stage gets fewer of them.
    counts = [
        len(stage.layers)
        for stage in GPT2.all_stages(find_config("gpt2-124m"), ParallelContext.virtual(pp=4))
    ]
    assert sum(counts) == 12
    assert counts[-1] < min(counts[:-1])
    small = GPT2Config(vocab_size=61, layers=5, hidden_size=32, heads=4)
    uniform = GPT2.all_stages(small, ParallelContext.virtual(pp=4))
    assert sorted(len(stage.layers) for stage in uniform) == [1, 1, 1, 2]
    assert [i for stage in uniform for i in stage.layers] == list(range(5))


def test_stages_may_be_cut_evenly_or_by_numbers():
    def counts(**how):
        return [
            len(s.layers)
            for s in GPT2.all_stages(find_config("gpt2-124m"), ParallelContext.virtual(pp=2, **how))
        ]

    assert counts(stage_layers="uniform") == [6, 6]
    assert counts(stage_layers=(8, 4)) == [8, 4]
    assert counts(stage_layers="uniform", virtual=3) == [2] * 6
    assert counts(virtual=2)[-1] < min(counts(virtual=2)[:-1]), "the head is in the last"
    for wrong in ((6, 5), (12,), (12, 0), "even"):
        with pytest.raises(UserError, match="stage-layers"):
            counts(stage_layers=wrong)


REFUSED = [
    ({"heads": 5}, 1, 1, "hidden-size 32 is not divisible by heads 5"),
    ({"ffn_size": 132}, 3, 1, "heads 4 can't be sharded over tp 3: use tp 1, 2 or 4"),
    ({}, 8, 1, "heads 4 can't be sharded over tp 8: use tp 1, 2 or 4"),
    ({"ffn_size": 3}, 4, 1, "ffn-size 3 can't be sharded over tp 4: use tp 1 or 2"),
    ({"activation": "geglu"}, 1, 1, "activation 'geglu' is not supported: use gelu_new"),
    ({}, 1, 4, "layers 3 are too few for pp 4 stages: use pp of at most 3"),
]


def test_a_layout_that_does_not_fit_is_refused():
    for overrides, tp, pp, message in REFUSED:
        config = GPT2Config(**{**SIZES, **overrides})
        with pytest.raises(UserError, match=message):
            GPT2.on_meta(config, ParallelContext.virtual(tp, pp))


def test_unknown_preset_names_the_nearest():
    with pytest.raises(
        UserError, match=r"unknown model or preset 'gpt2-xxl'; did you mean gpt2-xl\?"
    ):
        megazoo.from_config("gpt2-xxl")


def test_bad_inputs_of_a_batch_are_refused():
    model = megazoo.from_config(GPT2Config(**SIZES))
    with pytest.raises(UserError, match="a sequence of 25 exceeds the model's max-positions 24"):
        model(torch.zeros(1, 25, dtype=torch.long))
    with pytest.raises(UserError, match="token id 61 is outside the vocabulary of 61"):
        model(torch.full((1, 4), 61))
    with pytest.raises(UserError, match="num_microbatches 2 does not divide the batch of 3"):
        model.train_batch(token_ids(), labels=token_ids(), num_microbatches=2)
    with pytest.raises(UserError, match="label 61 is outside the vocabulary of 61"):
        model.train_batch(token_ids(), targets=torch.full((3, 24), 61))
    with pytest.raises(UserError, match="label -1 is outside the vocabulary of 61"):
        model(token_ids(), labels=torch.full((3, 24), -1))
    with pytest.raises(UserError, match="the last stage needs labels or targets"):
        model.train_batch(token_ids())
    with pytest.raises(UserError, match="the first stage needs input_ids"):
        model.train_batch(labels=token_ids())
    with pytest.raises(UserError, match="unknown schedule '2f2b': use one of gpipe, 1f1b"):
        model.train_batch(token_ids(), labels=token_ids(), schedule="2f2b")
    virtual = megazoo.from_config(GPT2Config(**SIZES), ParallelContext.virtual(tp=2))
    with pytest.raises(UserError, match="a virtual context has no other ranks"):
        virtual.train_batch(token_ids(), labels=token_ids())
