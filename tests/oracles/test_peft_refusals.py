"""Adapters that megazoo can't take are refused in one line, which names what is wrong."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import megazoo
from tests.support.peft_oracle import base_model, edit_config, with_adapters
from tests.support.training import context, run_in_layout

Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
V1 = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """The directories of a LLaMA and of its adapters."""
    root, hf = tmp_path_factory.mktemp("refused"), base_model("llama")
    hf.save_pretrained(root / "hf")
    with_adapters(hf, r=4, target_modules=["q_proj", "v_proj"]).save_pretrained(root / "adapter")
    return root / "hf", root / "adapter"


@pytest.fixture
def directories(originals, tmp_path):
    """A copy of the adapters, to be changed."""
    return originals[0], shutil.copytree(originals[1], tmp_path / "adapter")


def changed(originals, tmp_path, **values):
    """As `directories`, the config changed."""
    adapter = shutil.copytree(originals[1], tmp_path / "adapter", dirs_exist_ok=True)
    edit_config(adapter, **values)
    return adapter


CONFIGS = {
    "use_dora True is not supported": {"use_dora": True},
    "lora_bias True is not supported": {"lora_bias": True},
    "target_parameters 'experts.up' is not supported": {"target_parameters": ["experts.up"]},
    "trainable_token_indices a list is not supported": {"trainable_token_indices": [3]},
    "layer_replication a list is not supported": {"layer_replication": [[0, 2], [1, 3]]},
    "megatron_config an object is not supported": {"megatron_config": {"a": 1}},
    "alora_invocation_tokens a list is not supported": {"alora_invocation_tokens": [1]},
    "use_something_new 'yes' is not supported": {"use_something_new": "yes"},
    "bias 'lora_only' is not supported": {"bias": "lora_only"},
    "init_lora_weights 'pissa' is not supported": {"init_lora_weights": "pissa"},
    r"modules_to_save \['lm_head'\] is not supported": {"modules_to_save": ["lm_head"]},
    "belongs to a classifier: .* build the model with num_labels": {"modules_to_save": ["score"]},
    "peft_type is 'ADALORA': only LORA": {"peft_type": "ADALORA"},
    r"rank_pattern '\(q' is not a regular expression": {"rank_pattern": {"(q": 4}},
    r"alpha_pattern '\[q' is not a regular expression": {"alpha_pattern": {"[q": 4}},
    r"alpha_pattern '\(\(\(.* is not": {"alpha_pattern": {"(" * 9000 + ")" * 9000: 4}},
    "use at most 10000 characters, and no repetition": {"alpha_pattern": {r"((\w|\.)+)+!": 4}},
    "rank_pattern of 'q' is a huge number: it must be finite": {"rank_pattern": {"q": 10**400}},
    "r is 'eight': it must be an int": {"r": "eight"},
    "rank 0 must be 1 or more": {"r": 0},
    "dropout 1.5 must be below 1": {"lora_dropout": 1.5},
    r"q_proj.lora_A.weight has shape \[4, 32\], but in the model it has shape \[5, 32\]": {"r": 5},
    r"lacks .*layers.0.mlp.up_proj.lora_A.weight": {"target_modules": ["q_proj", "up_proj"]},
}  # fmt: skip


def test_what_a_config_may_not_say(originals, tmp_path):
    model = megazoo.from_pretrained(originals[0])
    for told, values in CONFIGS.items():
        adapter = changed(originals, tmp_path, **values)
        with pytest.raises(megazoo.UserError, match=told) as error:
            megazoo.lora.load(model, adapter)
        assert "\n" not in str(error.value), told
        assert str(adapter) in str(error.value), told
        assert not megazoo.lora.has_adapters(model), told
        assert all(parameter.requires_grad for parameter in model.parameters()), told


def test_what_a_config_may_say(originals, tmp_path):
    for key, value in (
        ("layers_to_transform", [0, 1, 2]), ("exclude_modules", ["k_proj"]), ("rank_pattern", None),
        ("base_model_name_or_path", "anything"), ("init_lora_weights", "gaussian"),
        ("target_modules", ".*[qv]_proj"), ("use_dora", False), ("a_key_of_later", None),
    ):  # fmt: skip
        adapter = changed(originals, tmp_path, **{key: value})
        model = megazoo.lora.load(megazoo.from_pretrained(originals[0]), adapter)
        assert model.attached.targets == ("q_proj", "v_proj"), key


def without(name):
    return lambda tensors: tensors.pop(name)


def renamed(name, other):
    return lambda tensors: tensors.update({other: tensors.pop(name)})


TENSORS = {
    f"lacks {Q0}": without(Q0),
    f"lacks {V1}": without(V1),
    "has the unexpected base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": renamed(
        Q0, Q0.replace(".0.", ".7.")
    ),
    "has the unexpected base_model.model.lm_head.lora_A.weight": lambda tensors: tensors.update(
        {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 32)}
    ),
    r"shape \[32, 4\], but in the model it has shape \[4, 32\]": lambda tensors: tensors.update(
        {Q0: tensors[Q0].T.contiguous()}
    ),
    "no adapter for a linear layer of this model; it has no tensors": dict.clear,
    "has the data type torch.int64: use one of": lambda tensors: tensors.update(
        {Q0: torch.ones(4, 32).long()}
    ),
}


def test_tensors_that_are_not_the_models(originals, directories):
    base, adapter = directories
    for told, change in TENSORS.items():
        tensors = load_file(originals[1] / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, adapter / "adapter_model.safetensors")
        with pytest.raises(megazoo.UserError, match=told):
            megazoo.lora.load(megazoo.from_pretrained(base), adapter)


def test_a_directory_of_no_adapter(directories, tmp_path):
    base, adapter = directories
    model = megazoo.from_pretrained(base)
    with pytest.raises(megazoo.UserError, match="nowhere is not a directory"):
        megazoo.lora.load(model, tmp_path / "nowhere")
    with pytest.raises(megazoo.UserError, match=r"it lacks adapter_config.json"):
        megazoo.lora.load(model, base)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(megazoo.UserError, match=r"it has neither adapter_model.safetensors"):
        megazoo.lora.load(model, adapter)
    (adapter / "adapter_config.json").write_text(json.dumps([1]))
    (adapter / "adapter_model.bin").write_bytes(b"code")
    with pytest.raises(
        megazoo.UserError, match=r"adapter_config.json holds a list, but must hold a JSON object"
    ):
        megazoo.lora.load(model, adapter)


def refused(base, adapter, layout):
    model = megazoo.from_pretrained(base, context(**layout))
    with pytest.raises(megazoo.UserError) as error:
        megazoo.lora.load(model, adapter)
    return str(error.value)


def test_every_rank_says_the_same(ranks, directories):
    base, adapter = directories
    edit_config(adapter, use_dora=True)
    told = run_in_layout(ranks, refused, dict(tp=2, pp=2), base, adapter)
    assert set(told) == {f"{adapter}/adapter_config.json: use_dora True is not supported"}
