"""Directories of Mistral, Qwen2, Qwen3 and Pythia: there and back bit for bit, older forms of
config.json, and the one line for what is not supported."""

import json
from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import megazoo
from megazoo.errors import UserError
from megazoo.formats.configs import config_from_hugging_face
from megazoo.formats.hugging_face.config import HARMLESS
from megazoo.programs import convert
from tests.support.families import COMMON, ONE_OF_EACH, TWINS, config_of, saved, twin
from tests.support.sampling import marked_slow
from tests.support.scripts import merge_shards

TOOLS = Path(__file__).parents[2] / "tools"


IDS = torch.randint(0, 61, (2, 21), generator=torch.Generator().manual_seed(2))
KINDS = {"mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "pythia": "GPTNeoX"}
MISTRAL = {**config_of("mistral, window").to_dict(), "rope_parameters": None}
QWEN2 = {**config_of("qwen2, tied").to_dict(), "rope_parameters": None, "layer_types": None}
QWEN3 = {**config_of("qwen3, wide heads").to_dict(), "rope_parameters": None}
PYTHIA = {**config_of("pythia").to_dict(), "rope_parameters": None}


def logits_of(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def files_of(directory: Path) -> dict:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("name", "dtype"),
    marked_slow(
        list(product(TWINS, (torch.float32, torch.bfloat16))),
        lambda number, _: number % 10 not in (0, 5),  # fast: a fifth, in turns of either dtype
        name=lambda case: f"{case[0]}-{case[1]}",
    ),
)
def test_there_and_back_through_shards_is_bit_for_bit(name, dtype, tmp_path):
    hf = AutoModelForCausalLM.from_pretrained(saved(name, tmp_path), dtype=dtype)
    hf.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    convert.main([str(tmp_path / "hf"), str(tmp_path / "shards"), "--tp", "2", "--pp", "2"])
    merge_shards.main([str(tmp_path / "shards"), str(tmp_path / "back")])
    before, after = files_of(tmp_path / "hf"), files_of(tmp_path / "back")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype == dtype
        assert torch.equal(tensor, after[key]), key
    again, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=dtype, output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    expected = logits_of(hf)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-5
    assert (logits_of(again) - expected).abs().max() < tolerance * max(1, expected.abs().max())
    theirs, ours = hf.config.to_dict(), again.config.to_dict()
    differing = {key for key in theirs if theirs[key] != ours.get(key)}
    if not theirs.get("use_sliding_window"):
        differing -= {"max_window_layers"}  # of windows that are off
    assert differing <= {"_name_or_path", "initializer_range", "head_dim"}


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_backbone_and_older_buffers(name, tmp_path):
    path, hf = saved(name, tmp_path), twin(name)
    prefix = {"pythia": "gpt_neox."}.get(name, "model.")
    state = {
        key.removeprefix(prefix): tensor
        for key, tensor in load_file(path / "model.safetensors").items()
    }
    if name == "pythia":
        for layer in range(3):
            for buffer in ("bias", "masked_bias", "rotary_emb.inv_freq"):
                state[f"layers.{layer}.attention.{buffer}"] = torch.ones(4)
    save_file(state, path / "model.safetensors")
    assert (logits_of(megazoo.from_pretrained(path)) - logits_of(hf)).abs().max() < 1e-5 * 30


OLDER = {
    "mistral v0.1": {**MISTRAL, "rope_theta": 5e3, "sliding_window": 9},
    "mistral v0.3": {**MISTRAL, "rope_theta": 1e6, "sliding_window": None},
    "qwen2, as many heads": {**QWEN2, "num_key_value_heads": None},
    "mistral, as many heads": {**MISTRAL, "num_key_value_heads": 4, "head_dim": None},
    "mistral v0.1, as published": {**MISTRAL, "rope_theta": 1e4, "sliding_window": 4096},
    "qwen2, before the first layer": {
        **QWEN2,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": -1,
    },
    "qwen2, null and on": {**QWEN2, "use_sliding_window": True, "sliding_window": None},
    "qwen3, as many heads": {**QWEN3, "num_key_value_heads": None},
    "pythia, as published": {**PYTHIA, "rotary_pct": 0.25, "rotary_emb_base": 10000},
    "mistral, sizes of its own": {
        key: value for key, value in MISTRAL.items() if key != "sliding_window"
    },
    "qwen2": {
        **QWEN2,
        "rope_theta": 1e6,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 28,
    },
    "qwen2, layers by number": {
        **QWEN2,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 2,
    },
    "qwen3": {**QWEN3, "rope_theta": 1e6, "max_window_layers": 3, "rope_scaling": None},
    "pythia": {**PYTHIA, "rotary_pct": 0.5, "rotary_emb_base": 5000},
    "pythia, neither said": PYTHIA,
}


def test_older_forms_of_the_config_are_read_as_transformers_reads_them(tmp_path):
    for name in OLDER:
        (tmp_path / name).mkdir()
        check_older_form(name, tmp_path / name)


def check_older_form(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OLDER[name]))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    torch.manual_seed(1)
    hf = AutoModelForCausalLM.from_config(config).eval()
    for parameter in hf.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(OLDER[name]))
    ours, theirs = logits_of(megazoo.from_pretrained(tmp_path)), logits_of(hf)
    assert (ours - theirs).abs().max() < 1e-5 * max(1, theirs.abs().max()), name


def test_every_field_of_transformers_is_used_or_refused():
    """Nothing that transformers' class has is dropped in silence, but what is known to be harmless,
    and the windows' fields, of which one switches the others on."""
    for family in KINDS:
        check_fields(family)


def check_fields(family):
    kind = getattr(transformers, f"{KINDS[family]}Config")
    sizes = COMMON if family == "pythia" else {**COMMON, "num_key_value_heads": 2}
    written = {**kind(**sizes).to_dict(), "rope_parameters": None, "layer_types": None}
    base, seen = config_from_hugging_face(dict(written)), set()
    for name in {field.name for field in fields(kind)} & written.keys() - HARMLESS:
        if (other := changed(name, written[name])) is not None:
            seen.add(name)
            assert differs({**written, name: other}, name, base), (family, name)
    assert {"vocab_size", "hidden_act", "tie_word_embeddings", "attention_dropout"} <= seen, family


def differs(values, name, base) -> bool:
    """Whether a field makes another config, or is refused by name."""
    try:
        return config_from_hugging_face(values) != base
    except UserError as error:
        return name in str(error)


def changed(name, value):
    """Another value of a field; None for those that others switch on."""
    if name in ("use_sliding_window", "max_window_layers", "layer_types") or (name, value) == (
        "sliding_window",
        None,
    ):
        return None
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value / 2 + 0.1
    if isinstance(value, int):
        return value // 2 if "num_" in name else value * 2
    return {"hidden_act": "relu"}.get(name)


REFUSED = {
    "another order": (
        {**QWEN2, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        "layer_types",
    ),
    "windows that are off": (
        {**QWEN2, "layer_types": ["full_attention"] + ["sliding_attention"] * 2},
        "use_sliding_window must be true",
    ),
    "too few types": ({**QWEN3, "layer_types": ["full_attention"]}, "layer_types"),
    "types of no kind": ({**QWEN3, "layer_types": [1, {}, None]}, "layer_types"),
    "a window of none": ({**MISTRAL, "sliding_window": 0}, "sliding_window 0 is not supported"),
    "a window below none": ({**MISTRAL, "sliding_window": -1}, "sliding_window -1 is not"),
    "no window in later layers": (
        {**QWEN2, "use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1},
        "sliding_window 0 is not supported",
    ),
    "a window below none in later layers": (
        {**QWEN3, "use_sliding_window": True, "sliding_window": -1, "max_window_layers": 1},
        "sliding_window -1 is not supported",
    ),
    "a window of true": ({**MISTRAL, "sliding_window": True}, "sliding_window is True"),
    "a window of text": ({**MISTRAL, "sliding_window": "4"}, "sliding_window is '4'"),
    "an odd part of a head": ({**PYTHIA, "rotary_pct": 0.13}, "rotates 1 of a head's 8 features"),
    "too little of a head": ({**PYTHIA, "rotary_pct": 0.1}, "rotates 0 of a head's 8 features"),
    "an odd head": ({**QWEN3, "head_dim": 7}, "an even head size, got 7"),
    "more than a head": ({**PYTHIA, "rotary_pct": 1.5}, "rotary_fraction 1.5 rotates"),
    "none of a head": ({**PYTHIA, "rotary_pct": 0.0}, "rotary_fraction 0.0 rotates"),
    "another rotary": (
        {**PYTHIA, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "rope_type 'linear' is not supported",
    ),
    "attention to later tokens": ({**QWEN3, "is_causal": False}, "is_causal False is not"),
}


def test_what_is_not_supported_is_refused_by_name():
    for case, (values, told) in REFUSED.items():
        with pytest.raises(UserError, match=told) as error:
            config_from_hugging_face(dict(values))
        assert "\n" not in str(error.value), case
