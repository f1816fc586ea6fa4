"""Weights in oneDNN's layout: the same numbers, for inference in bfloat16 on CPUs that gain."""

import copy
from dataclasses import replace

import pytest
import torch

import megazoo
from megazoo.errors import UserError
from megazoo.layers import pack_weights
from megazoo.layers.linear import ParallelLinear
from megazoo.layers.packed_weights import PACKED
from megazoo.parallel.cpu import products
from megazoo.torch_internals import packs_weights
from tests.support.training import MODELS, randomize

pytestmark = pytest.mark.skipif(
    not packs_weights(), reason="oneDNN has no bfloat16 for this CPU: it needs AVX-512"
)
IDS = torch.arange(3 * 12).reshape(3, 12)


@pytest.fixture(autouse=True)
def _gains(monkeypatch):
    monkeypatch.setattr(products, "methods", lambda: products.Methods(False, True))
    monkeypatch.setattr(products, "FEWEST_WEIGHTS", 1)


def model_of(name, **changes):
    config = replace(MODELS[name], **changes)
    return randomize(megazoo.from_config(config, seed=3, dtype=torch.bfloat16)).eval()


def linears(model):
    return [layer for layer in model.modules() if isinstance(layer, ParallelLinear)]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_packed_weights_give_the_same_numbers(name):
    plain = model_of(name)
    packed = copy.deepcopy(plain)
    pack_weights(packed)
    pack_weights(packed)  # once more changes nothing
    assert all(layer.product is PACKED and layer.weight.is_mkldnn for layer in linears(packed))
    with torch.no_grad():
        expected, found = plain(IDS).logits.float(), packed(IDS).logits.float()
    assert (found - expected).norm() / expected.norm() < 2e-2
    assert torch.equal(
        packed.generate(IDS, max_new_tokens=4), plain.generate(IDS, max_new_tokens=4)
    )


def test_other_weights_and_other_cpus_stay_as_they_are(monkeypatch):
    adapted = model_of("llama")
    megazoo.lora.add(adapted, rank=2, targets=["attention.qkv"])
    pack_weights(adapted)
    assert {layer.weight.is_mkldnn for layer in linears(adapted)} == {True, False}
    wide = model_of("llama").float()
    pack_weights(wide)
    monkeypatch.setattr(products, "methods", lambda: products.Methods(True, True))
    widened = model_of("llama")
    pack_weights(widened)
    monkeypatch.setattr(products, "methods", lambda: products.Methods(False, True))
    monkeypatch.setattr(products, "FEWEST_WEIGHTS", 1 << 18)
    small = model_of("llama")
    pack_weights(small)
    for model in (wide, widened, small):
        assert not any(parameter.is_mkldnn for parameter in model.parameters())
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_a_packed_model_can_not_do_is_refused(tmp_path):
    model = model_of("llama")
    pack_weights(model)
    for what, work in {
        "saved": lambda: model.save_parallelized(tmp_path / "a"),
        "adapted": lambda: megazoo.lora.add(model, rank=2),
        "trained": lambda: model.train_batch(IDS, labels=IDS),
    }.items():
        with pytest.raises(UserError, match=f"oneDNN's layout can't be {what}: .* before pack"):
            work()
