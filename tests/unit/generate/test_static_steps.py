"""Steps of fixed shapes, which CUDA replays as graphs, generate what steps of growing shapes do."""

from itertools import pairwise, product
from unittest import mock

import pytest
import torch
from torch import nn

import megazoo
from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.microbatch import static_steps as marked
from megazoo.errors import Advice
from megazoo.generate import group as groups
from megazoo.layers import CausalSelfAttention
from megazoo.layers.cache import KVCache
from megazoo.layers.static_cache import StaticKVCache
from megazoo.models.llama import Llama, LlamaConfig
from megazoo.models.mpt import MPTConfig
from tests.support.generation import SIZES, prompts
from tests.support.sampling import marked_slow, pairs_covered
from tests.support.static_steps import OnTheHost, Replayed, Trace, static_steps
from tests.support.training import context, layout_name, randomize, run_in_layout, tiny_config

LONG = {**SIZES, "max_positions": 160}
ROPE = {"rope_type": "dynamic", "factor": 4.0}
CONFIGS = {
    "gpt2": tiny_config(max_positions=160),
    "llama": LlamaConfig(**LONG, kv_heads=2, ffn_size=48),
    "llama, dynamic": LlamaConfig(**LONG, kv_heads=1, ffn_size=48, rope_scaling=ROPE),
    "mpt": MPTConfig(**LONG),
    "mpt, groups": MPTConfig(**LONG, kv_heads=2, qk_norm=True),
}
WAYS = {
    "greedy": {"eos_token_id": [4, 9]},
    "nothing ends": {},
    "beams": {"num_beams": 3, "eos_token_id": [4, 9], "length_penalty": 2.0},
    "draws": {"do_sample": True, "num_return_sequences": 3, "top_k": 0},
}


def model_of(name: str, ctx=None):
    return randomize(megazoo.from_config(CONFIGS[name], ctx, seed=3))


def generated(model, ids, mask, **settings):
    return model.generate(ids, mask, max_new_tokens=10, **settings)  # from 60 tokens past 64


FACTORS = list(CONFIGS), list(WAYS), [False, True], [False, True]


@pytest.mark.parametrize(
    "cases",
    [pairs_covered(*FACTORS), pytest.param(list(product(*FACTORS)), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_static_steps_generate_the_same(cases):
    models, (ids, mask) = {name: model_of(name) for name in CONFIGS}, prompts(length=60)
    for case in cases:
        name, way, padded, graphs = case
        given = models[name], ids, mask if padded else None
        expected = generated(*given, **WAYS[way])
        with static_steps(graphs) as steps:
            assert torch.equal(generated(*given, **WAYS[way]), expected), case
        assert bool(steps) == graphs, case


def in_layout(layout):
    model, (ids, mask) = model_of("mpt", context(**layout)), prompts(length=60)
    with static_steps():
        return [generated(model, ids, mask, **settings) for settings in WAYS.values()]


@pytest.mark.parametrize("layout", [dict(tp=2), dict(pp=2), dict(pp=2, v=2)], ids=layout_name)
def test_static_steps_generate_the_same_in_every_layout(ranks, layout):
    expected = in_layout({})
    for made in run_in_layout(ranks, in_layout, layout):
        assert all(torch.equal(*pair) for pair in zip(made, expected, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_logits_of_static_steps_are_those_of_growing_ones(name):
    """Over a bucket's end, with padding on the left, for each cache given the same tokens."""
    model, (ids, mask) = model_of(name).eval(), prompts(length=60)
    stage, later = model.stages[0], prompts(seed=2, length=10)[0]
    logits = {}
    with torch.inference_mode():
        for kind in (KVCache, StaticKVCache):
            static = kind is StaticKVCache
            cache = kind(70, 1, *([ids.device] if static else []))
            segments = torch.cat([mask - 1, torch.zeros(4, 100, dtype=torch.int64)], dim=1)
            for step, tokens in enumerate([ids, *later.split(1, dim=1)]):
                keys = cache.keys(tokens.shape[1])
                places = (mask.cumsum(1) - 1).clamp(min=0)
                places = places if step == 0 else places[:, -1:] + step
                batch = MicroBatch(
                    tuple(tokens.shape), tokens, position_ids=places, segments=segments[:, :keys],
                    longest=60 + step, cache=cache, last_only=True,
                )  # fmt: skip
                x = model.output_head.outputs(model.forward_stage(tokens, batch, stage), batch)
                cache.advance(tokens.shape[1])
                logits.setdefault(kind, []).append(x)
    torch.testing.assert_close(logits[StaticKVCache], logits[KVCache], atol=2e-6, rtol=1e-5)


def test_rows_that_go_on_from_others_have_their_keys_and_values():
    caches, layer = [KVCache(70, 3), StaticKVCache(70, 3, torch.device("cpu"))], nn.Identity()
    sources = torch.tensor([2, 2, 0, 3, 5, 3])
    for tokens in (60, 1, 1, 1, 1, 1):
        k, v = torch.randn(2, 2 if tokens > 1 else 6, 4, tokens, 8)
        for cache in caches:
            kept = cache.extend(layer, k, v)
            cache.advance(tokens)
            if tokens == 1:
                cache.reorder(sources)
                kept = torch.stack([each[:, :, : cache.used] for each in kept])
                assert torch.equal(kept, cache._kept[layer][:, :, :, : cache.used])
        same = [cache._kept[layer][..., : cache.used, :] for cache in caches]
        assert torch.equal(*same)
    assert not torch.equal(same[0][0, 0], same[0][0, 3])
    assert torch.equal(same[0][0, 0], same[0][0, 1])


@pytest.mark.parametrize(
    ("name", "way"),
    marked_slow(
        list(product(CONFIGS, WAYS)),
        lambda _, case: (FACTORS[0].index(case[0]) + FACTORS[1].index(case[1])) % len(WAYS),
    ),
)
def test_a_captured_step_reads_nothing_on_the_host_and_keeps_its_addresses(name, way):
    model, (ids, mask) = model_of(name), prompts(length=60)
    with static_steps(graphs=True, traced=True) as steps:
        generated(model, ids, mask, **WAYS[way])
    by_capture = {}
    for graph, capture, operators in steps:
        by_capture.setdefault((graph, capture), []).append(operators)
    assert {capture for _, capture in by_capture} <= {1, 2}  # 64 places, then 128
    assert len(by_capture) == 2
    assert min(map(len, by_capture.values())) > 1
    for made in by_capture.values():
        assert all(one == other for one, other in pairwise(made))


def test_the_trace_sees_reads_and_new_addresses():
    kept, position = torch.zeros(8), torch.zeros(1, dtype=torch.int64)
    for read in (lambda: bool(position), lambda: kept[position > 0], lambda: position.nonzero()):
        with pytest.raises(OnTheHost), Trace():
            read()
    growing, fixed = [], []
    for used in range(2):
        with Trace() as trace:
            kept[used : used + 1] = position
        growing.append(trace.operators)
        with Trace() as trace:
            kept.index_copy_(0, position, kept[:1] * 2)
        fixed.append(trace.operators)
    assert growing[0] != growing[1]
    assert fixed[0] == fixed[1]


def test_a_step_that_cant_be_captured_is_told_and_runs_as_it_is():
    model, (ids, mask) = model_of("gpt2"), prompts(length=60)
    expected = generated(model, ids, mask)

    class Failing(Replayed):
        _capture = groups.StepGraph._capture

    graph = mock.Mock(side_effect=RuntimeError("operation not permitted\nmore"))
    with (
        static_steps(graphs=True) as steps,
        mock.patch.object(groups, "StepGraph", Failing),
        mock.patch.multiple(torch.cuda, CUDAGraph=mock.Mock(), graph=graph),
        mock.patch.object(Failing, "stream", None, create=True),
        pytest.warns(Advice, match="without CUDA graphs.*: operation not permitted$"),
    ):
        assert torch.equal(generated(model, ids, mask), expected)
    assert graph.call_count == 1
    assert not steps


def test_families_that_say_nothing_and_attention_of_ones_own_keep_growing_shapes():
    def takes(model):
        with mock.patch.object(model, "ctx", mock.Mock(device=torch.device("cuda"))):
            return groups.takes_static_steps(model)

    class Own(Llama):
        def forward_stage(self, x, batch, stage):
            return super().forward_stage(x, batch, stage)

    class Marked(Own):
        forward_stage = marked(lambda self, *given: Llama.forward_stage(self, *given))

    class Attention(CausalSelfAttention):
        def forward(self, *given, **more):
            return super().forward(*given, **more)

    config, ctx = CONFIGS["llama"], megazoo.ParallelContext()
    model = Llama.build(config, ctx)
    assert takes(model)
    assert takes(Marked.build(config, ctx))
    assert not takes(Own.build(config, ctx))
    for module in model.modules():
        if isinstance(module, CausalSelfAttention):
            module.__class__ = Attention
    assert not takes(model)
    assert not groups.takes_static_steps(Llama.build(config, ctx)), "not on CPUs"
    undeclared = Llama.build(config, ctx)
    undeclared.layers["0"].attention = nn.Identity()
    assert not takes(undeclared)
