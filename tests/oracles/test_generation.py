"""Generation equals transformers' own, cached or not, and is the same in every layout."""

from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import megazoo
from megazoo.errors import UserError
from megazoo.evaluation.scoring import score
from megazoo.generate import GenerationSettings
from megazoo.generate.generate import _generating, _groups
from megazoo.models.llama import LlamaConfig
from tests.support.generation import FAMILIES, PAD, SIZES, generate, of_transformers, prompts
from tests.support.sampling import marked_slow
from tests.support.training import (
    context,
    layout_name,
    randomize,
    run_in_layout,
    tiny_config,
    world,
)
from tests.support.transformers_models import ROPE, llama_of, llama_tensors

SETTINGS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams, early, longer": {"num_beams": 3, "early_stopping": True, "length_penalty": 2.0},
    "beams, never early, shorter": {"num_beams": 3, "early_stopping": "never"}
    | {"length_penalty": -0.5},
    "beams, never early, longer": {"num_beams": 2, "early_stopping": "never"}
    | {"length_penalty": 1.5},
    "beams, longer": {"num_beams": 2, "early_stopping": False, "length_penalty": 3.0},
}
NEW = 16
# Where the search for prompts without a close decision begins, for settings whose first ones all
# have some.
FIRST_PROMPTS = {
    ("gpt2", "beams, never early, longer"): 3,
    ("mpt", "beams"): 3,
    ("mpt", "beams, never early, longer"): 11,
    ("mpt", "beams, longer"): 4,
}
LAYOUTS = [dict(tp=2), dict(pp=2), dict(pp=4), dict(tp=2, pp=2), dict(tp=2, pp=4)]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """For every family a model of transformers, on disk, and what it generates."""
    made = []
    for family, build in FAMILIES.items():
        model, path = build(), tmp_path_factory.mktemp(family)
        model.save_pretrained(path)
        for name, settings in SETTINGS.items():
            first = FIRST_PROMPTS.get((family, name), 0)
            # the first prompts without a close decision, of which some rows end early
            for seed in range(first, 100):
                ids, mask = prompts(seed)
                settings = {
                    "max_new_tokens": NEW,
                    "pad_token_id": PAD,
                    **settings,
                    "eos_token_id": 60,
                }
                free, _ = of_transformers(model, ids, mask, **settings)
                settings["eos_token_id"] = [60, int(free[seed % 4, 9 + 5])]
                out, margin = of_transformers(model, ids, mask, **settings)
                ended = (out[:, 9:] == PAD).any(dim=1)
                single, single_margin = of_transformers(model, ids[:1], mask[:1], **settings)
                if min(margin, single_margin) > 1e-4 and ended.any() and not ended.all():
                    break
            else:
                raise AssertionError(f"no prompts for {family}, {name}")
            made += [(path, settings, ids, mask, out), (path, settings, ids[:1], None, single)]
    return made


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_greedy_and_beam_search_equal_transformers_cached_or_not(cases, every):
    for ours, (path, settings, *_, expected) in zip(generate(cases, {}), cases, strict=True):
        assert torch.equal(ours, expected), f"{path.name}, {settings}"
    # the ways of stopping are those of the search, which knows of no cache
    some = [case for case in cases if every or "early_stopping" not in case[1]][
        :: 1 if every else 3
    ]
    for ours, (path, settings, *_, expected) in zip(
        generate(some, {}, use_cache=False), some, strict=True
    ):
        assert torch.equal(ours, expected), f"{path.name}, {settings}, without a cache"


@pytest.mark.parametrize(
    ("family", "layout"),
    marked_slow(
        list(product(FAMILIES, LAYOUTS)),
        lambda _, case: case not in (("mpt", LAYOUTS[2]), ("gpt2", LAYOUTS[3])),
        name=lambda case: f"{case[0]}-{layout_name(case[1])}",
    ),
)
def test_greedy_and_beam_search_are_the_same_in_layouts(ranks, cases, family, layout):
    # the other ways of stopping are the last stage's alone
    some = [c for c in cases if c[0].name.startswith(family) and "early_stopping" not in c[1]]
    for outputs in ranks(generate, world(layout), some, layout):
        for (_, settings, *_, expected), ids in zip(some, outputs, strict=True):
            assert torch.equal(ids, expected), settings


@pytest.mark.parametrize(
    "name",
    marked_slow([name for name in ROPE if name != "dynamic"], lambda number, _: number % 2),
)
def test_scaled_rotary_generates_the_same_cached_and_uncached(name):
    """The other positions: against transformers, above."""
    sizes = {**SIZES, "kv_heads": 2, "ffn_size": 48, "rope_scaling": ROPE[name]}
    model = with_random_weights(LlamaConfig(**sizes), seed=5)
    ids, mask = prompts()
    for settings in (SETTINGS["greedy"], SETTINGS["beams, never early, longer"]):
        settings = {"max_new_tokens": NEW, "eos_token_id": 2, **settings}
        cached = model.generate(ids, mask, **settings)
        assert torch.equal(cached, model.generate(ids, mask, use_cache=False, **settings))
    greedy = model.generate(ids[:1], max_new_tokens=NEW)[0, 9:]  # row 0 has no padding
    again = model(torch.cat([ids[:1], greedy[None, :-1]], dim=1)).logits.argmax(dim=-1)[0, 8:]
    assert torch.equal(again, greedy)


def with_random_weights(config, **how):
    model = megazoo.from_config(config, **how)
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return model


def test_dynamic_scaling_past_the_context_is_the_uncached_result():
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    sizes = {**SIZES, "max_positions": 16, "ffn_size": 48}
    model = with_random_weights(LlamaConfig(**sizes, rope_scaling=scaling))
    ids = prompts()[0][:1]
    out = model.generate(ids, max_new_tokens=30)
    for length in range(9, 39):
        assert model(out[:, :length]).logits[0, -1].argmax() == out[0, length]


@pytest.mark.parametrize(
    "name",
    marked_slow([name for name in ROPE if name != "llama3"], lambda number, _: number % 2),
)
def test_scaled_rotary_generates_past_the_models_positions_what_transformers_does(name):
    """With and without a cache; dynamic scaling, of which transformers' cache keeps what it turned
    before, without."""
    sizes = {**SIZES, "max_positions": 32, "kv_heads": 2, "ffn_size": 48}
    config = LlamaConfig(**sizes, rope_scaling=ROPE[name])
    hf, model = llama_of(config), megazoo.from_config(config)
    weights = llama_tensors(hf, config)
    with torch.no_grad():
        for entry in model.entries():
            entry.parameter.copy_(weights[entry.name])
    hf.generation_config.eos_token_id = None  # to the end, past 32
    settings, ids = {"max_new_tokens": 50, "pad_token_id": PAD}, prompts()[0][:1]
    expected = hf.generate(ids, do_sample=False, use_cache=name != "dynamic", **settings)
    for use_cache in (True, False):
        assert torch.equal(model.generate(ids, use_cache=use_cache, **settings), expected)
    with pytest.raises(UserError, match="max-positions 64"):
        model.generate(ids, max_new_tokens=56)


# the head takes as long as many layers
WIDE = {"vocab_size": 4000, "max_positions": 64, "layers": 2}


def on_stages_without_layers(layout):
    ctx = context(**layout)
    model = randomize(megazoo.from_config(tiny_config(**WIDE), ctx, seed=3))
    ids, mask = prompts(batch=3)
    ways = [
        {},
        {"do_sample": True, "num_return_sequences": 2},
        {"num_beams": 3},
        {"num_beams": 3, "length_penalty": 2.0},
    ]
    settings = {"max_new_tokens": 6, "eos_token_id": 7}
    made = [
        model.generate(ids, mask, use_cache=use_cache, **settings, **way)
        for way in ways
        for use_cache in (True, False)
    ]
    return [len(stage.layers) for stage in model.stages], made


@pytest.mark.parametrize(
    "layout",
    marked_slow(
        [dict(pp=2), dict(pp=2, dp=4), dict(dp=4), dict(tp=2, pp=2)],
        lambda _, layout: layout not in (dict(pp=2), dict(dp=4)),
        name=layout_name,
    ),
)
def test_a_stage_without_layers_and_a_replica_without_rows_generate_too(ranks, layout):
    expected = on_stages_without_layers({})[1]
    for rank, (layers, made) in enumerate(run_in_layout(ranks, on_stages_without_layers, layout)):
        assert layers == [2 if rank < world(layout) // layout.get("pp", 1) else 0]
        assert len(made) == len(expected)
        assert all(torch.equal(*pair) for pair in zip(made, expected, strict=True))


def test_padding_does_not_change_what_a_row_becomes():
    model = megazoo.from_config(LlamaConfig(**SIZES, ffn_size=48), seed=2)
    ids, mask = prompts()
    settings = {"max_new_tokens": 12, "repetition_penalty": 1.5, "no_repeat_ngram_size": 1}
    together = model.generate(ids, mask, **settings)
    for token in together[:, 9].tolist():  # no penalty for what pads
        assert torch.equal(
            model.generate(ids.masked_fill(mask == 0, token), mask, **settings)[:, 9:],
            together[:, 9:],
        )
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = model.generate(ids[row : row + 1, -length:], **settings)
        assert torch.equal(alone[0, length:], together[row, 9:])


def dynamic(layout):
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    config = LlamaConfig(**{**SIZES, "max_positions": 12}, ffn_size=48, rope_scaling=scaling)
    model = megazoo.from_config(config, context(**layout), seed=4)
    ids, mask = prompts(batch=2)
    return model.generate(ids, mask.roll(1, 0), max_new_tokens=30)


def test_dynamic_scaling_is_that_of_the_whole_batch(ranks):
    expected = dynamic({})
    for layout in (dict(pp=2), dict(dp=2)):
        for ids in ranks(dynamic, 2, layout):
            assert torch.equal(ids, expected), layout


def cache_sizes(layout):
    ctx = context(**layout)
    model = megazoo.from_config(LlamaConfig(**SIZES, kv_heads=2, ffn_size=48), ctx)
    settings = GenerationSettings(max_new_tokens=10)
    with _generating(model), torch.inference_mode():
        groups = _groups(model, prompts(batch=2)[0], None, range(2), settings, True)
        for group in groups:
            for _ in range(3):
                batch = group.batch()
                x = batch.input_ids if model.stages[0].first else torch.randn(*batch.shape, 32)
                model.forward_stage(x, batch, model.stages[0])
                group.cache.advance(batch.shape[1])
                group.input_ids = group.input_ids[:, -1:]
    kept = [list(group.cache._kept.values()) for group in groups]
    return [(len(layers), *layers[0].shape) for layers in kept]


def test_the_cache_holds_the_ranks_heads_and_layers_for_all_tokens(ranks):
    whole = cache_sizes({})
    # layers, keys and values, rows, KV heads, 9 + 10 - 1 tokens, head size
    assert whole == [(5, 2, 2, 2, 18, 8)]
    for rank, sizes in enumerate(ranks(cache_sizes, 4, dict(tp=2, pp=2))):
        assert sizes == [((3, 2)[rank // 2], 2, 1, 1, 18, 8)] * 2  # in two groups of one row each


def test_generating_leaves_the_model_as_it_was():
    model = megazoo.from_config(tiny_config(max_positions=64, dropout=0.3), seed=3)
    ids = prompts(batch=2)[0]
    assert torch.equal(model.generate(ids), model.generate(ids))
    assert model.training
    model.layers["0"].eval()
    model.generate(ids)
    assert not model.layers["0"].training
    model.train()
    model.train_batch(ids, labels=ids)
    assert all(entry.parameter.grad is not None for entry in model.entries())


BROKEN = "the model's logits are not finite (NaN or infinite): its weights are broken, or overflow"


def broken_generation(value, layout):
    """What generating and scoring are refused with, if one token has no finite embedding, and the
    last prompt alone has that token; and whether the ranks can go on together."""
    ctx = context(**layout)
    model = megazoo.from_config(tiny_config(max_positions=64, tied=False), ctx, seed=1).eval()
    ids = torch.arange(1, 13).view(4, 3)
    if model.has_first:
        first = model.embedding.start
        if first <= 12 < first + len(model.embedding.weight):
            with torch.no_grad():
                model.embedding.weight[12 - first] = value
    errors, streamed = [], []
    for settings in ({}, {"do_sample": True}, {"num_beams": 3}):
        errors.append(error_of(lambda s=settings: model.generate(ids, max_new_tokens=4, **s)))
    streamer = SimpleNamespace(put=streamed.append, end=lambda: None)
    errors.append(error_of(lambda: model.generate(ids[3:], streamer=streamer, max_new_tokens=4)))
    errors.append(error_of(lambda: score(model, ids, ids)))
    assert not streamed
    assert model.generate(ids[:3], max_new_tokens=2).shape == (3, 5)
    return errors


def error_of(function) -> tuple[str, int]:
    with pytest.raises(UserError) as caught:
        function()
    return str(caught.value), caught.value.exit_code


@pytest.mark.parametrize(
    ("layout", "value"),
    [({}, torch.nan), (dict(tp=2), torch.nan), (dict(pp=2, dp=2), torch.inf)],
    ids=["one process", "tp2", "pp2dp2"],
)
def test_logits_that_are_no_numbers_are_told_on_every_rank(ranks, layout, value):
    for errors in run_in_layout(ranks, broken_generation, layout, value):
        assert errors == [(f"{BROKEN} in float32", 1)] * 5


def test_a_cpu_stops_at_the_first_logits_that_are_no_numbers():
    model = megazoo.from_config(tiny_config(max_positions=64), seed=1)
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    for settings in ({}, {"do_sample": True}, {"num_beams": 3}):
        with mock.patch.object(model, "forward_stage", wraps=model.forward_stage) as forward:
            error_of(
                lambda s=settings: model.generate(torch.ones(2, 3).long(), max_new_tokens=9, **s)
            )
        assert forward.call_count == 1, settings
