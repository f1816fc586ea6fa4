"""What users of transformers call on a model and its config, with transformers as the oracle."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
import transformers
from torch import nn

import megazoo
from megazoo.errors import UserError
from megazoo.families.registry import FAMILIES
from megazoo.models import GPT2, Model
from megazoo.models.registry import find_config
from tests.support.layouts import in_layout
from tests.support.training import context, randomize

SIZES = {"vocab_size": 61, "tie_word_embeddings": True}
GPT2_CONFIG = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=32, **SIZES)
LLAMA_CONFIG = transformers.LlamaConfig(
    num_hidden_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=32,
    **SIZES,
)
CONFIGS = {"gpt2": GPT2_CONFIG, "llama": LLAMA_CONFIG}
IDS = torch.arange(24).reshape(2, 12)


def counted_and_saved(name, directory, layout):
    """The numbers of parameters that each rank finds, its logits, and the model's files."""
    ctx = context(**layout)
    model = randomize(megazoo.from_config(CONFIGS[name], ctx, seed=3)).eval()
    logits = model(IDS, return_logits=True).logits
    model.save_pretrained(directory, max_shard_size="20KB")
    counts = [model.num_parameters()]
    if "0" in model.layers:  # of which other stages know nothing
        model.layers["0"].requires_grad_(False)
    counts += [model.num_parameters(only_trainable=True), model.num_parameters()]
    return counts, logits


@pytest.mark.parametrize("layout", ["tp1", "tp2pp2"])
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_counted_and_saved_as_in_transformers(ranks, tmp_path, name, layout):
    results = in_layout(ranks, counted_and_saved, layout, name, tmp_path / "saved")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    whole = theirs.num_parameters()
    next(module for key, module in theirs.named_modules() if key.endswith(".0")).requires_grad_(
        False
    )
    expected = [whole, theirs.num_parameters(only_trainable=True), whole]
    assert expected[1] < whole
    for counts, logits in results:
        assert counts == expected
        if logits is not None:
            assert (logits - theirs(IDS).logits).abs().max() < 1e-5
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == whole
    assert not list((tmp_path / "saved").glob("*_pp_*"))


def test_adapters_are_counted():
    model = megazoo.from_config("llama-tiny")
    before = model.num_parameters()
    megazoo.lora.add(model, rank=2)
    added = sum(p.numel() for name, p in model.named_parameters() if ".lora." in name)
    assert model.num_parameters() == before + added
    assert model.num_parameters(only_trainable=True) == added


def test_a_model_has_a_device_and_recomputes():
    model, ids = megazoo.from_config("gpt2-tiny"), IDS
    assert model.device == model.ctx.device == torch.device("cpu")
    runs = []
    model.layers["0"].register_forward_hook(lambda *_: runs.append(1))
    model.train_batch(ids, labels=ids)
    model.gradient_checkpointing_enable()
    model.train_batch(ids, labels=ids)
    assert len(runs) == 1 + 2


@dataclass(frozen=True)
class Bare:
    """A Config of one's own that inherits from nothing."""

    vocab_size: int = 61
    max_positions: int = 32
    hidden_size: int = 32
    layers: int = 1
    heads: int = 2
    ffn_size: int = 64


def test_a_config_becomes_a_dictionary_and_comes_back(tmp_path, monkeypatch):
    family = type("BareModel", (GPT2,), {"Config": Bare, "presets": {"bare-tiny": Bare()}})
    with pytest.raises(UserError, match="Bare is not the Config of a registered family"):
        Bare().to_dict()
    monkeypatch.setitem(FAMILIES, "bare", family)
    tiny = [model.presets[f"{name}-tiny"] for name, model in FAMILIES.items()]
    stretched = {"rope_type": "linear", "factor": 2.0}
    for config in (*tiny, replace(find_config("llama-tiny"), rope_scaling=stretched)):
        values = config.to_dict()
        assert type(values) is dict
        assert find_config(values) == config
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert find_config(tmp_path / "config.json") == config
    assert values["model"] == "llama"
    assert megazoo.from_config(values).config == config
    assert find_config(GPT2_CONFIG.to_dict()) == find_config(GPT2_CONFIG)
    for wrong, message in (
        ({}, "has neither model_type"),
        ({"model": "lama"}, "did you mean llama"),
    ):
        with pytest.raises(UserError, match=f"^the config.*{message}"):
            find_config(wrong)


def test_a_model_has_few_names_of_its_own():
    own = [name for name in {*dir(Model)} - {*dir(nn.Module)} if name[0] != "_"]
    assert len(own) <= 41


def first_factors(layout, **how):
    """The initial values of this rank's factors A, by name."""
    model = megazoo.lora.add(megazoo.from_config("llama-tiny", context(**layout), seed=3), **how)
    return {name: p.detach() for name, p in model.named_parameters() if name.endswith(".lora.q.A")}


def test_adapters_have_a_seed_of_their_own(ranks):
    given = first_factors({}, seed=5)
    assert len(given) == 4
    model = first_factors({})
    for name, values in given.items():
        assert not torch.equal(values, model[name])
        assert torch.equal(first_factors({}, seed=3)[name], model[name]), "by default the model's"
    for found in in_layout(ranks, first_factors, "tp2pp2", seed=5):
        assert len(found) == 2
        for name, values in found.items():
            assert torch.equal(values, given[name])
    with pytest.raises(UserError, match="seed must be a whole number"):
        first_factors({}, seed="5")
