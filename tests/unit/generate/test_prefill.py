"""Prompts that go through in pieces, and a shared prefix that goes through once, generate what
transformers does, in memory that the piece bounds."""

from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import product
from unittest import mock

import pytest
import torch

import megazoo
from megazoo.generate import decoding, prefill
from megazoo.layers import KVCache, segment_mask
from megazoo.layers.static_cache import StaticKVCache
from megazoo.models.llama import LlamaConfig
from megazoo.models.mistral import MistralConfig
from megazoo.models.mpt import MPTConfig
from megazoo.planning.meter import Meter
from tests.support.families import saved, twin
from tests.support.generation import FAMILIES, PAD, decided, prompts
from tests.support.sampling import pairs_covered, sampled, sampled_pairs
from tests.support.static_steps import static_steps
from tests.support.training import context, layout_name, randomize, run_in_layout, world
from tests.support.windows import HEADS, SIZE, TINY, built, by_hand

WHOLE = 10**9
NEW, LENGTH, ALIKE = 10, 17, 7
WINDOWS = ["mistral, window", "qwen2, windows in later layers"]
NAMES = [*FAMILIES, *WINDOWS]
KINDS = ["whole rows", "padded", "alike", "nearly the same"]
BY = {"greedy": {}, "beams": {"num_beams": 3, "length_penalty": 2.0}}
SOME_AND_ALL = [False, pytest.param(True, marks=pytest.mark.slow)]
LAYOUTS = [
    {},
    dict(tp=2),
    dict(pp=2),
    dict(tp=2, pp=2),
    dict(pp=2, v=2),
    dict(dp=2),
    dict(cp=2),
    dict(pp=4),
]


@contextmanager
def in_pieces(piece: int, shared: int = WHOLE):
    """Within this block so many tokens of a row at most go through together, and so many that all
    rows begin with are worth a forward of their own."""
    with mock.patch.multiple(prefill, PIECE=piece, SHARED=shared):
        yield


def alike(ids, mask, tokens: int = ALIKE):
    """The prompts with so many first tokens that are all the same; the next one never is."""
    ids = ids.clone()
    for row, first in enumerate((mask == 0).sum(dim=1).tolist()):
        ids[row, first : first + tokens] = torch.arange(20, 20 + tokens)
        ids[row, first + tokens] = 40 + row
    return ids


def model_of_transformers(name: str):
    return FAMILIES[name]() if name in FAMILIES else twin(name)


def written(name: str, directory):
    if name in FAMILIES:
        FAMILIES[name]().save_pretrained(directory / name)
        return directory / name
    return saved(name, directory)


def some_prompts(kind: str, seed: int):
    """Ids and their mask: whole rows, padded ones, those that begin alike, or those that have few
    tokens of their own, so that the end sees what the prefix has become even through windows."""
    ids, mask = prompts(seed, length=LENGTH)
    if kind == "nearly the same":
        mask = (torch.arange(LENGTH) >= torch.tensor([0, 1, 0, 2])[:, None]).long()
        return alike(ids.masked_fill(mask == 0, PAD), mask, LENGTH - 4), mask
    if kind == "whole rows":
        return ids.masked_fill(mask == 0, 13), None
    return (alike(ids, mask), mask) if kind == "alike" else (ids, mask)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """By family, kind and way what transformers generates, from prompts without a close
    decision."""
    made, directory = {}, tmp_path_factory.mktemp("prefill")
    for name in NAMES:
        hf, path = model_of_transformers(name), written(name, directory)
        hf.generation_config.eos_token_id = None
        for kind, (way, settings) in product(KINDS, BY.items()):
            settings = {"max_new_tokens": NEW, "pad_token_id": PAD, **settings}
            found = decided(hf, partial(some_prompts, kind), 1e-4, f"{name}, {kind}", **settings)
            made[name, kind, way] = (path, {**settings, "eos_token_id": []}, *found)
    return made


def generated(chosen, layout):
    """What every case becomes, in any layout, with its piece and shared tokens."""
    ctx, outputs = context(**layout), []
    load = cache(lambda path: megazoo.from_pretrained(path, ctx))
    for sizes, (path, settings, ids, mask, _) in chosen:
        with in_pieces(*sizes):
            outputs.append(load(path).generate(ids, mask, **settings))
    return outputs


def has_layers_enough(layout, _, name, *__):
    return layout.get("pp", 1) * layout.get("v", 1) <= 3 or name not in WINDOWS


IN_LAYOUTS = LAYOUTS, [(5, WHOLE), (3, 2)], NAMES, KINDS, list(BY)
COVERED = pairs_covered(*IN_LAYOUTS, possible=has_layers_enough)


@pytest.mark.parametrize("every", SOME_AND_ALL, ids=["some", "all"])
@pytest.mark.parametrize("layout", sampled(LAYOUTS, 2, seed=2, name=layout_name))
def test_pieces_generate_what_transformers_does(ranks, cases, layout, every):
    all_of_them = filter(lambda case: has_layers_enough(*case), product(*IN_LAYOUTS))
    here = [case[1:] for case in (all_of_them if every else COVERED) if case[0] == layout]
    assert here
    chosen = [(sizes, cases[tuple(case)]) for sizes, *case in here]
    for outputs in run_in_layout(ranks, generated, layout, chosen):
        for case, (_, (*_, expected)), ids in zip(here, chosen, outputs, strict=True):
            assert torch.equal(ids, expected), case


OF_LOGITS = [1, 2, 3, 4, 5, 6, 16], [False, True], [2, WHOLE], NAMES, KINDS


@pytest.mark.parametrize("every", SOME_AND_ALL, ids=["some", "all"])
def test_the_logits_after_pieces_are_transformers(cases, every):
    load, oracle = cache(megazoo.from_pretrained), cache(model_of_transformers)
    for case in product(*OF_LOGITS) if every else pairs_covered(*OF_LOGITS):
        piece, static, shared, name, kind = case
        path, _, ids, mask, _ = cases[name, kind, "greedy"]
        places = {"attention_mask": mask if mask is not None else torch.ones_like(ids)}
        if name != "mpt":
            places["position_ids"] = (places["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            expected = oracle(name)(ids, **places).logits[:, -1]
        logits = first_logits(load(path), ids, mask, piece, shared, static)
        assert (logits - expected).abs().max() / expected.abs().max() < 1e-5, case


def first_logits(model, ids, mask, piece, shared, static):
    """The logits that the first token is chosen by."""
    seen = []

    def choose(self, logits):
        seen.append(logits)
        return original(self, logits)

    original = decoding.Sampler.choose
    steps = static_steps() if static else nullcontext()
    with steps, in_pieces(piece, shared), mock.patch.object(decoding.Sampler, "choose", choose):
        model.generate(ids, mask, max_new_tokens=2, eos_token_id=[])
    return seen[0]


SIZES = {**TINY, "layers": 4}
OWN = {
    "mpt": MPTConfig(**SIZES),
    "window": MistralConfig(**SIZES, window=5),
    "dynamic": LlamaConfig(**SIZES, rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
}
WAYS = {
    "draws": {"do_sample": True, "num_return_sequences": 3, "top_k": 0},
    "one prompt": {"num_beams": 3},
    "penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "eos_token_id": [4, 9]},
}


def in_every_way(name, layout, piece, shared, static=False, use_cache=True):
    model = randomize(megazoo.from_config(OWN[name], context(**layout), seed=3))
    outputs = []
    for way, settings in WAYS.items():
        ids, mask = some_prompts("alike", 1)
        if way == "one prompt":
            ids, mask = ids[:1], mask[:1]
        settings = {"max_new_tokens": NEW, "use_cache": use_cache, **settings}
        steps = static_steps(graphs=static == "graphs") if static else nullcontext()
        with steps, in_pieces(piece, shared):
            outputs.append(model.generate(ids, mask, **settings))
    return outputs


@cache
def without_a_cache(name):
    """Where every forward takes all tokens."""
    return in_every_way(name, {}, WHOLE, WHOLE, use_cache=False)


STATIC, SIZES_OF_PIECES = [False, "steps", "graphs"], [(4, WHOLE), (4, 2), (WHOLE, 2)]


@pytest.mark.parametrize(
    ("name", "static", "sizes"), sampled_pairs(list(OWN), STATIC, SIZES_OF_PIECES)
)
def test_draws_copies_and_penalties_go_on_from_pieces(name, static, sizes):
    made = in_every_way(name, {}, *sizes, static)
    assert all(torch.equal(*pair) for pair in zip(made, without_a_cache(name), strict=True))


@pytest.mark.parametrize("layout", [dict(tp=2, pp=2), dict(pp=2, v=2)], ids=layout_name)
def test_static_steps_go_on_from_pieces_in_a_pipeline(ranks, layout):
    for made in ranks(in_every_way, world(layout), "mpt", layout, 3, 2, "steps"):
        assert all(torch.equal(*pair) for pair in zip(made, without_a_cache("mpt"), strict=True))


# What is computed.


def tokens_seen(model, ids, mask, piece, shared) -> list[tuple]:
    """The shapes of what the embedding sees for the prompts."""
    shapes = []
    hook = model.embedding.register_forward_pre_hook(
        lambda module, given: shapes.append(tuple(given[0].shape))
    )
    with in_pieces(piece, shared):
        model.generate(ids, mask, max_new_tokens=1)
    hook.remove()
    return shapes


def test_a_shared_prefix_is_computed_once():
    model = megazoo.from_config(OWN["window"], seed=3)
    ids, mask = prompts(batch=4, length=LENGTH)
    whole = alike(ids, torch.ones_like(mask))
    padded = alike(ids, mask)  # 0, 2, 4 and 6 tokens of padding
    assert tokens_seen(model, whole, None, WHOLE, ALIKE) == [(1, 7), (4, 10)]
    assert tokens_seen(model, whole, None, 4, ALIKE) == [(1, 4), (1, 3), (4, 4), (4, 4), (4, 2)]
    assert tokens_seen(model, padded, mask, WHOLE, ALIKE) == [(1, 7), (4, 10)]
    # all rows but the first: two tokens are nobody's
    assert tokens_seen(model, padded[1:], mask[1:], WHOLE, ALIKE) == [(1, 7), (3, 8)]
    # the same prompt four times: each row's last token is its own
    same = whole[:1].expand(4, -1)
    assert tokens_seen(model, same, None, WHOLE, ALIKE) == [(1, 16), (4, 1)]
    # not worth it
    assert tokens_seen(model, whole, None, WHOLE, ALIKE + 1) == [(4, 17)]
    assert tokens_seen(model, whole[:1], None, WHOLE, ALIKE) == [(1, 17)]
    assert tokens_seen(model, ids, mask, WHOLE, 2) == [(4, 17)]


def test_padding_in_the_middle_of_a_row_is_no_prefix():
    model = randomize(megazoo.from_config(OWN["window"], seed=3))
    ids, mask = prompts(length=LENGTH)
    ids, mask = alike(ids, torch.ones_like(mask)), torch.ones_like(mask)
    mask[1, 3] = 0
    assert tokens_seen(model, ids, mask, WHOLE, 2) == [(4, 17)]
    expected = model.generate(ids, mask, max_new_tokens=NEW, use_cache=False)
    with in_pieces(3, 2):
        assert torch.equal(model.generate(ids, mask, max_new_tokens=NEW), expected)


def test_pieces_have_all_tokens_and_a_bound():
    for rows, tokens in product([1, 2, 7, 8, 9, 60, 5000], [1, 512, 513, 2048, 2049]):
        ids = torch.arange(tokens).expand(rows, -1)
        pieces = [piece.input_ids for piece in prefill.pieces_of(ids, None, None, None)]
        assert torch.equal(torch.cat(pieces, dim=1), ids), (rows, tokens)
        assert max(piece.shape[1] for piece in pieces) <= prefill.PIECE
        assert max(piece.numel() for piece in pieces) <= max(prefill.TOKENS, rows)
        if tokens <= 2048 and rows * tokens <= 4096:
            assert len(pieces) == 1, (rows, tokens)


def peak(config, length: int, piece: int) -> int:
    """The peak of live bytes while one token is generated, without the keys and values of all
    tokens."""
    model = megazoo.from_config(config, seed=3)
    ids = torch.arange(length).view(1, length) % 61
    with in_pieces(piece), Meter(model.ctx) as meter:
        model.generate(ids, max_new_tokens=1)
    return meter.peak - length * config.layers * 2 * config.hidden_size * 4


def test_memory_grows_with_the_piece_and_not_with_the_square_of_the_prompt():
    config = MPTConfig(vocab_size=61, max_positions=8192, hidden_size=32, layers=2, heads=4)
    scores = 4 * config.heads  # bytes of a number for each head
    assert peak(config, 2048, WHOLE) > scores * 2048**2
    in_pieces_of_64 = peak(config, 2048, 64)
    assert in_pieces_of_64 < 4 * scores * 64 * 2048
    assert peak(config, 4096, 64) < 2.1 * in_pieces_of_64


# Caches.


PARTS = [(3, 4, 1, 8), (1, 1, 14), (9, 7), (6, 5, 5), (2,) * 8]


@pytest.mark.parametrize("window", [1, 3, 5, 9, 16])
def test_an_attention_sees_its_window_in_pieces_of_any_length(window):
    for case in product(PARTS, [None, "boolean", "added"]):
        check_pieces(window, *case)


def check_pieces(window, parts, masked):
    """Also without a mask that is made for the pieces."""
    layer, x = built(window), torch.randn(2, 16, HEADS * SIZE)
    segments = torch.tensor([[-1] * 3 + [0] * 13, [0] * 16]) if masked else None
    mask, last, outputs = segment_mask(segments), 0, []
    cache = KVCache(16, prompt=16)
    with torch.no_grad():
        for part in parts:
            first, last = last, last + part
            own = None if mask is None else mask[:, :, first:last, :last]
            if masked == "added":
                own = torch.zeros(own.shape).masked_fill(~own, -torch.inf)
            outputs.append(layer(x[:, first:last], mask=own, cache=cache))
            cache.advance(part)
        expected = by_hand(layer, x, window, segments)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, atol=1e-5, rtol=1e-5)
    assert [kept.shape[3] for kept in cache._kept.values()] == [window]


@pytest.mark.parametrize(("window", "static"), list(product([None, 4, 30], [False, True])))
def test_a_prefix_is_put_behind_the_padding_of_each_row(window, static):
    prefix, layer = KVCache(9, prompt=9, windows=False), torch.nn.Module()
    layer.window = window
    k, v = torch.randn(2, 1, 3, 9, 2)
    for first, last in ((0, 5), (5, 9)):
        prefix.extend(layer, k[:, :, first:last], v[:, :, first:last])
        prefix.advance(last - first)
    given = (20, 2, *([torch.device("cpu")] if static else []))
    cache = (StaticKVCache if static else KVCache)(*given, prompt=14)
    padding = torch.tensor([3, 1])
    cache.begin_with(prefix, padding, 10)
    assert cache.used == 10
    assert cache.in_prompt
    assert not static or cache.position.item() == 10
    kept, places = cache._kept[layer], min(window or cache.length, cache.length)
    assert kept.shape == (2, 4, 3, places, 2)
    for row in range(4):
        behind = padding[row // 2]
        for place in range(max(int(behind), 10 - places), 10):
            assert torch.equal(kept[0, row, :, place % places], k[0, :, place - behind])
            assert torch.equal(kept[1, row, :, place % places], v[0, :, place - behind])
