"""A family on top of LLaMA, in a file of 40 lines, has all that the families of the zoo have."""

from dataclasses import asdict
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

import megazoo
from megazoo.families.names import hf_names
from megazoo.families.registry import FAMILIES
from megazoo.models.counts import flops_per_token
from megazoo.models.llama import LlamaConfig
from megazoo.planning.meter import forward_flops
from megazoo.planning.plan import note_on_mfu
from tests.support.sampling import marked_slow
from tests.support.training import (
    assert_outputs_equal,
    inputs_for,
    layout_name,
    randomize,
    randomized_,
    train,
    transformers_case,
    world,
    worst_relative,
)


@pytest.fixture(scope="module")
def config():
    """Known as "qwen" for these tests only."""
    from tests.support.own_family import Qwen

    megazoo.register("qwen")(Qwen)
    yield Qwen.presets["qwen-tiny"]
    del FAMILIES["qwen"]


TRAINED = [dict(tp=2, sp=True), dict(pp=2), dict(tp=2), dict(tp=4)]


@pytest.mark.parametrize("layout", marked_slow(TRAINED, lambda n, _: n > 1, name=layout_name))
def test_it_trains_as_in_one_process(ranks, config, layout):
    expected = train(config, {}, 4)
    for history in ranks(train, world(layout), config, layout, 4):
        assert worst_relative(history, expected) < 1e-5


def test_it_keeps_fused_attention(config):
    model = megazoo.from_config(config)
    ids = torch.randint(0, 61, (2, 16))
    kernel = F.scaled_dot_product_attention
    with mock.patch.object(F, "scaled_dot_product_attention", side_effect=kernel) as fused:
        model.train_batch(ids, labels=ids)
    assert fused.call_count == config.layers


def saved_bytes(config, mode) -> int:
    """Bytes of what one forward and loss save for backward, parameters aside."""
    model, saved = megazoo.from_config(config).recompute(mode), {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.randint(0, 61, (4, 16))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, labels=ids).loss
    del loss
    return sum(size for place, size in saved.items() if place not in parameters)


def test_selective_recomputation_saves_what_it_saves_a_llama_and_gives_the_same_bits(config):
    saves, saves_llama = (
        saved_bytes(c, "none") - saved_bytes(c, "selective")
        for c in (config, LlamaConfig(**asdict(config)))
    )
    assert saves == saves_llama > 0
    assert train(config, {}, 3, recompute=("selective",)) == train(config, {}, 3)


def test_it_generates_with_a_cache_what_it_generates_without(config):
    model = randomize(megazoo.from_config(config, seed=3))
    prompt = torch.randint(0, 61, (3, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    forward = type(model).forward_stage
    watched = mock.patch.object(type(model), "forward_stage", autospec=True, side_effect=forward)
    with watched as stage:
        cached = model.generate(prompt, mask, max_new_tokens=8)
    assert stage.call_args.args[1].shape == (3, 1), "a step takes one token"
    assert torch.equal(cached, model.generate(prompt, mask, max_new_tokens=8, use_cache=False))


def test_mfu_counts_what_runs(config):
    model = megazoo.from_config(config, megazoo.ParallelContext(device=torch.device("meta")))
    runs = 3 * forward_flops(model, 1, 16) / 16
    assert flops_per_token(config, 16) == pytest.approx(runs, rel=1e-9)
    assert note_on_mfu(config, 16) is None


@pytest.fixture(scope="module")
def qwen3(config):
    """The case whose oracle is transformers' Qwen3, with its weights under our names."""
    torch.manual_seed(0)
    of_hf = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )
    hf = randomized_(Qwen3ForCausalLM(of_hf))
    state, family = hf.state_dict(), FAMILIES["qwen"]
    weights = {
        entry.name: torch.cat([state[name] for name in hf_names(family, entry.name).names])
        for entry in megazoo.from_config(config).entries()
    }
    return transformers_case("qwen3", config, hf, weights, inputs_for(config.max_positions))


ASKED = [dict(), dict(tp=4), dict(tp=2, pp=2, sp=True), dict(tp=2)]


@pytest.mark.parametrize("layout", marked_slow(ASKED, lambda n, _: n > 2, name=layout_name))
def test_logits_equal_transformers_qwen3(ranks, qwen3, layout):
    assert_outputs_equal(ranks, [qwen3], layout)
