"""Attention whose queries look at a window of tokens alone: against a plain softmax, cut over
ranks, packed, from caches that keep the window only; and a part of a head that is turned."""

from dataclasses import replace
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch

import megazoo
from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError
from megazoo.layers import (
    CausalSelfAttention,
    KVCache,
    MaskPerChunk,
    MaskPerWindow,
    Packed,
    Rotary,
    attend,
    rotate,
    segment_mask,
)
from megazoo.layers.qkv import split_heads
from megazoo.layers.static_cache import StaticKVCache
from megazoo.models.counts import flops_per_token
from megazoo.models.masks import mask_of
from megazoo.models.mistral import Block, MistralConfig
from megazoo.models.qwen2 import Qwen2Config
from tests.support.attention import attentive, each_alone
from tests.support.generation import prompts
from tests.support.sampling import marked_slow
from tests.support.static_steps import static_steps
from tests.support.training import context, layout_name, randomize, run_in_layout
from tests.support.windows import HEADS, SIZE, TINY, TOKENS, built, by_hand

MIXED = Qwen2Config(**TINY, window=5, full_layers=1)


def gradients(layer, x, compute):
    """What compute(x) returns, with the gradients of x and of all parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = compute(x)
    y.sin().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


@pytest.mark.parametrize("window", [1, 2, 7, TOKENS, TOKENS + 3])
def test_a_query_looks_at_its_window_alone(window):
    layer, x = built(window), torch.randn(2, TOKENS, HEADS * SIZE)
    for recompute, mask in product([False, True], [None, "boolean", "added"]):
        layer.recompute = recompute
        segments = torch.tensor([[0] * 9 + [1] * 7, [0] * 16]) if mask else None
        given = segment_mask(segments)
        if mask == "added":
            given = torch.zeros(given.shape).masked_fill(~given, -torch.inf)
        ours = gradients(layer, x, lambda x, given=given: layer(x, mask=given))
        theirs = gradients(layer, x, lambda x, own=segments: by_hand(layer, x, window, own))
        for mine, plain in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, plain, atol=3e-5, rtol=1e-5)


def test_a_window_has_a_place_for_the_token_itself():
    for window in (0, -1):
        with pytest.raises(UserError, match="window must be at least 1, got"):
            CausalSelfAttention(24, 4, window=window)


def test_packed_documents_have_the_window_too(monkeypatch):
    monkeypatch.setattr(attend, "varlen_attention", each_alone)
    layer, x = built(3), torch.randn(2, TOKENS, HEADS * SIZE)
    segments = torch.tensor([[0] * 9 + [1] * 7, [2] * 16])
    packed = Packed(torch.tensor([0, 9, 16, 32], dtype=torch.int32), TOKENS)
    torch.testing.assert_close(
        layer(x, mask=packed), by_hand(layer, x, 3, segments), atol=1e-5, rtol=1e-5
    )


def test_masks_of_chunks_need_the_window():
    with pytest.raises(UserError, match="does not hide the tokens beyond a window of 3"):
        built(3)(torch.randn(1, 8, HEADS * SIZE), mask=MaskPerChunk((None, None)))


def masks_of(config, dtype=torch.float32, **fields):
    model = megazoo.from_config(config, seed=3)
    batch = MicroBatch((2, TOKENS), **fields)
    return model, mask_of(batch, model.layers, dtype)


def test_layers_of_one_window_share_a_mask():
    model, masks = masks_of(MIXED)
    assert isinstance(masks, MaskPerWindow)
    assert {layer.attention.window for layer in model.layers.values()} == {None, 5}
    assert masks.masks.keys() == {None, 5}
    assert masks.masks[None] is None
    seen = masks.masks[5][0, 0] == 0
    assert seen.sum(dim=-1).tolist() == [1, 2, 3, 4] + [5] * 12
    _, masks = masks_of(MistralConfig(**TINY, window=TOKENS))
    assert masks.masks == {TOKENS: None}  # what is not longer than the window needs none
    assert masks_of(MistralConfig(**TINY, window=0))[1] is None


def test_the_mask_is_made_once_for_all_layers():
    model = megazoo.from_config(MistralConfig(**TINY, window=5), seed=3)
    ids = torch.randint(0, 61, (2, TOKENS))
    with mock.patch("megazoo.layers.attend.window_mask", side_effect=AssertionError):
        model(ids)


class OwnBlock(Block):
    """It has another forward, so that its mask is the segments' alone."""

    def forward(self, x, batch, rotary, mask):
        return super().forward(x, batch, rotary, mask)


def own_loss(layout, own=True):
    """The loss of packed documents, with layers of one's own or without."""
    ctx, ids = context(**layout), torch.arange(2 * TOKENS).view(2, TOKENS)
    model = attentive(MistralConfig(**TINY, window=5), ctx)
    for layer in model.layers.values() if own else ():
        layer.__class__ = OwnBlock
    documents = torch.tensor([[0] * 9 + [1] * 7, [0] * 16])
    return [
        model.train_batch(ids, targets=ids, document_ids=given).item()
        for given in (None, documents)
    ]


@pytest.mark.parametrize("layout", [{}, dict(cp=2), dict(cp=2, method="ulysses")], ids=layout_name)
def test_a_layer_of_ones_own_gets_the_window_as_well(ranks, layout):
    expected = own_loss({}, own=False)
    for losses in run_in_layout(ranks, own_loss, layout) if layout else [own_loss({})]:
        assert losses == pytest.approx(expected, rel=1e-5)


# Caches.


def stepwise(config, prompt, steps, cache, segments=None):
    """The logits of a prompt, and of later tokens one at a time, with what a cache keeps; and those
    of all tokens at once."""
    model = randomize(megazoo.from_config(config, seed=3)).eval()
    stage, ids = model.stages[0], torch.randint(0, 61, (2, prompt + steps))
    logits, whole = [], MicroBatch((2, prompt + steps), ids, segments=segments)
    with torch.inference_mode():
        for part in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)):
            keys = cache.keys(part.shape[1])
            seen = segments
            if segments is not None:
                seen = torch.nn.functional.pad(segments, (0, 200))[:, :keys]
            alone = cache.position if cache.used else None
            batch = MicroBatch(
                tuple(part.shape), part, segments=seen, cache=cache, position_ids=alone
            )
            logits.append(model.output_head.outputs(model.forward_stage(part, batch, stage), batch))
            cache.advance(part.shape[1])
        plain = model.output_head.outputs(model.forward_stage(ids, whole, stage), whole)
    return torch.cat(logits, dim=1), plain


CACHES = {
    "grows": lambda length: KVCache(length),
    "static": lambda length: StaticKVCache(length, 1, torch.device("cpu")),
}
PROMPTS_AND_WINDOWS = [(3, 5), (5, 5), (12, 5), (4, 1), (60, 70)]


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_that_keeps_the_window_is_as_good_as_all(kind):
    for (prompt, window), padded in product(PROMPTS_AND_WINDOWS, [False, True]):
        config, steps = MistralConfig(**TINY, window=window), 13
        cache, segments = CACHES[kind](prompt + steps), None
        if padded:
            segments = torch.zeros(2, prompt + steps, dtype=torch.int64)
            segments[0, :2] = -1
        stepped, whole = stepwise(config, prompt, steps, cache, segments)
        torch.testing.assert_close(stepped, whole, atol=1e-5, rtol=1e-4)
        places = {kept.shape[3] for kept in cache._kept.values()}
        assert places == {min(window, cache.length)}, (prompt, padded)
        if window < prompt:
            assert cache.length > window


@pytest.mark.parametrize("kind", CACHES)
def test_each_layer_keeps_its_own_window(kind):
    cache = CACHES[kind](20)
    torch.testing.assert_close(*stepwise(MIXED, 9, 11, cache), atol=1e-5, rtol=1e-4)
    assert [kept.shape[3] for kept in cache._kept.values()] == [cache.length, 5, 5]


BEAMS = {"num_beams": 3, "length_penalty": 2.0}


@pytest.mark.parametrize(
    ("window", "settings"),
    marked_slow(list(product([1, 5, 30], [{}, BEAMS])), lambda number, _: number in (0, 2, 5)),
)
def test_generation_past_the_window(window, settings):
    model = randomize(megazoo.from_config(MistralConfig(**TINY, window=window), seed=3))
    ids, mask = prompts(length=8)
    for given in (None, mask):
        plain = model.generate(ids, given, max_new_tokens=24, use_cache=False, **settings)
        assert torch.equal(model.generate(ids, given, max_new_tokens=24, **settings), plain)
        for graphs in (False, True):
            with static_steps(graphs) as steps:
                made = model.generate(ids, given, max_new_tokens=24, **settings)
            assert torch.equal(made, plain)
            assert bool(steps) == graphs


def test_rows_go_on_from_others_after_the_window_came_round():
    cache, layer = KVCache(40, 3), torch.nn.Module()
    layer.window = 4
    sources, kept = torch.tensor([2, 2, 0, 3, 5, 3]), []
    for tokens in (6, 1, 1, 1, 1, 1, 1):
        k, v = torch.randn(2, 2 if tokens > 1 else 6, 1, tokens, 2)
        cache.extend(layer, k, v)
        cache.advance(tokens)
        if tokens > 1:
            kept = list(k.repeat_interleave(3, dim=0).split(1, dim=2))
            continue
        kept = [each[sources] for each in (*kept, k)]
        cache.reorder(sources)
    places = [cache._kept[layer][0, :, :, token % 4] for token in range(8, 12)]
    assert all(
        torch.equal(*pair) for pair in zip(places, [k[:, :, 0] for k in kept[-4:]], strict=True)
    )


# Over ranks.


def trained_both_ways(layout, config=MIXED):
    return [trained(kind, layout, config) for kind in ("plain", "packed")]


def trained(kind, layout, config):
    """The loss and the gradients of a batch."""
    ctx = context(**layout)
    model = attentive(config, ctx)
    ids = torch.randint(0, 61, (4, TOKENS), generator=torch.Generator().manual_seed(1))
    documents = (torch.arange(TOKENS) >= 7).long().expand(4, -1) if kind == "packed" else None
    loss = model.train_batch(ids, targets=ids, document_ids=documents, num_microbatches=2)
    return loss.item(), {entry.name: entry.parameter.grad for entry in model.entries()}


LAYOUTS = [
    *(dict(cp=2, method="ulysses"), dict(tp=2, sp=True), dict(pp=2), dict(tp=2, cp=2)),
    *(dict(cp=2), dict(cp=4), dict(tp=4)),
]


@pytest.mark.parametrize("layout", marked_slow(LAYOUTS, lambda n, _: n > 1, name=layout_name))
def test_windows_in_every_layout(ranks, layout):
    wholes, without = trained_both_ways({}), trained_both_ways({}, replace(MIXED, window=0))
    assert all(abs(one[0] - other[0]) > 1e-3 for one, other in zip(wholes, without, strict=True))
    for found in run_in_layout(ranks, trained_both_ways, layout):
        for (loss, own), (expected, gradients) in zip(found, wholes, strict=True):
            assert loss == pytest.approx(expected, rel=1e-5)
            for name, gradient in own.items():
                if gradient.shape == gradients[name].shape:
                    torch.testing.assert_close(gradient, gradients[name], atol=1e-5, rtol=1e-4)


# What is counted, and what is turned.


def test_flops_of_a_window_are_those_within_it():
    config = MistralConfig(**TINY, window=5)
    of_attention = 12 * 4 * 8 * 3  # forward and backward of 4 heads of 8 features in 3 layers
    least = flops_per_token(config, 1)
    assert flops_per_token(config, 5) - least == 4 * of_attention
    assert flops_per_token(config, 100) == flops_per_token(config, 5)
    assert flops_per_token(replace(config, window=0), 100) - least == 99 * of_attention


@pytest.mark.parametrize("turned", [2, 4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_each_head_is_turned(turned, dtype):
    """Against transformers' GPT-NeoX, values and gradients; and within the projection's split."""
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

    q, k = (torch.randn(2, HEADS, TOKENS, SIZE).to(dtype).requires_grad_() for _ in range(2))
    cos, sin = Rotary(turned, 10000.0, 64)(torch.arange(TOKENS), dtype)
    expected = apply_rotary_pos_emb(q, k, cos[None], sin[None])
    half = dict(atol=3e-2, rtol=2**-7)  # a unit in the last place of bfloat16
    close = partial(
        torch.testing.assert_close, **(dict(atol=1e-6, rtol=0) if dtype == torch.float32 else half)
    )
    for x, theirs in zip((q, k), expected, strict=True):
        for function in (rotate.__wrapped__, rotate):
            ours = function(x, cos, sin)
            close(ours, theirs)
            given = torch.randn_like(ours)
            (mine,) = torch.autograd.grad(ours, x, given, retain_graph=True)
            (other,) = torch.autograd.grad(theirs, x, given, retain_graph=True)
            close(mine, other)
    v = torch.randn(2, HEADS, TOKENS, SIZE, dtype=dtype)
    joined = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], dim=-1)
    parts = split_heads(joined, [HEADS * SIZE] * 3, SIZE, (cos, sin))
    for ours, theirs in zip(parts, (*expected, v), strict=True):
        close(ours, theirs)


def test_a_layer_whose_attention_declares_nothing_has_all_get_boolean_masks():
    model = megazoo.from_config(MIXED, seed=3)
    segments = torch.tensor([[0] * 9 + [1] * 7] * 2)
    batch = MicroBatch((2, TOKENS), segments=segments)
    assert isinstance(mask_of(batch, model.layers, torch.float32), MaskPerWindow)
    model.layers["1"].attention = torch.nn.Linear(4, 4)
    assert torch.equal(mask_of(batch, model.layers, torch.float32), segment_mask(segments))
