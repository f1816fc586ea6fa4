"""Weights in oneDNN's layout: the same numbers, for inference in bfloat16 on CPUs that gain."""

import copy
import gc
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import megazoo
from megazoo.cli import inference
from megazoo.errors import UserError
from megazoo.layers import pack_weights, round_to_int8
from megazoo.layers.linear import ParallelLinear
from megazoo.layers.packed_weights import PACKED
from megazoo.parallel.cpu import products
from megazoo.torch_internals import packs_weights
from tests.support.training import MODELS, context, layout_name, randomize, run_in_layout

pytestmark = pytest.mark.skipif(
    not packs_weights(), reason="oneDNN has no bfloat16 for this CPU: it needs AVX-512"
)
IDS = torch.arange(3 * 12).reshape(3, 12)


@contextmanager
def gaining():
    """Within this block every matrix gains from packing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "methods", lambda: products.Methods(False, True))
        patch.setattr(products, "FEWEST_WEIGHTS", 1)
        yield


@pytest.fixture(autouse=True)
def _gains():
    with gaining():
        yield


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
    assert packed.head.owner.packed.is_mkldnn
    assert not packed.head.matrix.is_mkldnn
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
        assert model.head.owner.packed is None
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_a_packed_model_can_not_do_is_refused(tmp_path):
    model = model_of("llama")
    pack_weights(model)
    for what, work in {
        "saved": lambda: model.save_parallelized(tmp_path / "a"),
        "adapted": lambda: megazoo.lora.add(model, rank=2),
        "trained": lambda: model.train_batch(IDS, labels=IDS),
        "converted": model.float,
        "copied": lambda: copy.deepcopy(model),
    }.items():
        with pytest.raises(UserError, match=f"oneDNN's layout can't be {what}: .* before pack"):
            work()
    with pytest.raises(UserError, match=r"layout in the model: load the weights first"):
        model.load_state_dict(model_of("llama").state_dict())
    part = model.head.owner
    with pytest.raises(UserError, match=r"layout in the model: load the weights first"):
        part.load_state_dict(part.state_dict())
    adapted = megazoo.lora.add(model_of("llama"), rank=2, targets=["attention.qkv"])
    pack_weights(adapted)
    with pytest.raises(UserError, match="oneDNN's layout can't be merged"):
        megazoo.lora.merge(adapted)


def freed_and_logits(layout):
    """Whether this rank's plain weights are freed, when they are packed and when they are rounded;
    and the logits of the packed model."""
    with gaining():
        freed, ctx = [], context(**layout)
        for change in (round_to_int8, pack_weights):
            config = MODELS["llama"]
            model = megazoo.from_config(config, ctx, seed=3, dtype=torch.bfloat16)
            randomize(model.eval())
            plain = [weakref.ref(layer.weight) for layer in linears(model)]
            change(model)
            gc.collect()
            freed.append(bool(plain) and all(each() is None for each in plain))
        with torch.no_grad():
            return freed, model(IDS[:2]).logits


@pytest.mark.parametrize("layout", [dict(tp=2), dict(dp=2, pp=2)], ids=layout_name)
def test_every_layout_frees_the_plain_weights_and_computes_the_same(ranks, layout):
    _, expected = freed_and_logits({})
    found = run_in_layout(ranks, freed_and_logits, layout)
    assert [freed for freed, _ in found] == [[True, True]] * len(found)
    logits = [each for _, each in found if each is not None]
    assert logits
    for each in logits:
        assert (each.float() - expected.float()).norm() / expected.float().norm() < 2e-2


def test_the_programs_pack_the_weights(tmp_path, monkeypatch):
    model_of("llama").save_parallelized(tmp_path / "model")
    seen = []
    monkeypatch.setattr(inference, "pack_weights", lambda model: seen.append(type(model).__name__))
    options = inference.InferenceOptions(source=str(tmp_path / "model"), tokenizer="byte")
    inference.run_with_model(options, lambda model, tokenizer: None)
    assert seen == ["Llama"]
