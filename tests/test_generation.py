"""Generation against transformers' own, cached against uncached, and the same ids in every layout."""

import pytest
import test_gpt2
import test_hugging_face
import test_llama
import torch
from helpers import context, layout_name, randomize, run_in_layout, tiny_config, world
from transformers import LogitsProcessorList
from transformers.generation import NoRepeatNGramLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.utils import GenerationMixin

import megazoo
from megazoo.errors import UserError
from megazoo.generate.decoding import GenerationSettings, draw, keep_likely, repeating
from megazoo.generate.generate import _generating, _groups
from megazoo.models.llama import LlamaConfig
from megazoo.models.mpt import MPTConfig

NEW, END, PAD = 32, [2, 5, 8, 11, 20, 30], 3
SIZES = {"vocab_size": 61, "max_positions": 64, "hidden_size": 32, "layers": 5, "heads": 4}
FAMILIES = {
    "gpt2": lambda: test_gpt2.hugging_face_model(n_layer=5, n_positions=64),
    "llama": lambda: test_llama.hugging_face_model(LlamaConfig(**SIZES, kv_heads=2, ffn_size=48)),
    "mpt": lambda: test_hugging_face.mpt(n_layers=5, max_seq_len=64),
}
SETTINGS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams, early, longer": {"num_beams": 3, "early_stopping": True, "length_penalty": 2.0},
    "beams, never early, shorter": {
        "num_beams": 3,
        "early_stopping": "never",
        "length_penalty": -0.5,
    },
    "beams, never early, longer": {
        "num_beams": 2,
        "early_stopping": "never",
        "length_penalty": 1.5,
    },
    "beams, longer": {"num_beams": 2, "early_stopping": False, "length_penalty": 3.0},
}
# Where the search for prompts without a close decision begins, for settings whose first ones all
# have some.
FIRST_PROMPTS = {
    ("gpt2", "beams, never early, longer"): 20,
    ("mpt", "beams"): 3,
    ("mpt", "beams, never early, longer"): 7,
}
LAYOUTS = [dict(tp=tp, pp=pp) for tp in (1, 2) for pp in (1, 2, 4)]


def prompts(seed: int = 1, batch: int = 4, length: int = 9):
    """Token ids, padded on the left to uneven lengths, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(12, 61, (batch, length), generator=generator)
    padding = torch.arange(batch)[:, None] * 2 % (length - 1)
    mask = (torch.arange(length) >= padding).long()
    return ids.masked_fill(mask == 0, PAD), mask


class Margins:
    """Within this block: `least`, how far apart transformers' candidates were at the closest
    decision."""

    def __enter__(self):
        self.least, self.choose = float("inf"), GenerationMixin._get_top_k_continuations

        def recorded(generation, accumulated_log_probs, beams_to_keep, **arguments):
            best = accumulated_log_probs.topk(beams_to_keep + 1).values
            gaps = (best[:, :-1] - best[:, 1:])[best[:, 1:] > -1e8]
            self.least = min([self.least, *gaps.tolist()])
            return self.choose(
                generation,
                accumulated_log_probs=accumulated_log_probs,
                beams_to_keep=beams_to_keep,
                **arguments,
            )

        GenerationMixin._get_top_k_continuations = recorded
        return self

    def __exit__(self, *_):
        GenerationMixin._get_top_k_continuations = self.choose

    def __call__(self, input_ids, scores):
        """As a logits processor, for greedy choice."""
        best = scores.topk(2).values
        self.least = min(self.least, (best[:, 0] - best[:, 1]).min().item())
        return scores


def of_transformers(model, ids, mask, **settings):
    """What transformers generates, and how close its closest decision was."""
    with Margins() as margins:
        processors = LogitsProcessorList([margins] if settings.get("num_beams", 1) == 1 else [])
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, logits_processor=processors, **settings
        )
    return out, margins.least


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


def generate(cases, layout, **more):
    """Every case's ids, in any layout."""
    ctx, models, outputs = context(**layout), {}, []
    for path, settings, ids, mask, _ in cases:
        if path not in models:
            models[path] = megazoo.from_pretrained(path, ctx)
        outputs.append(models[path].generate(ids, mask, **settings, **more))
    return outputs


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_greedy_and_beam_search_equal_transformers(ranks, cases, layout):
    if world(layout) > 1:  # the other ways of stopping are the last stage's alone
        cases = [case for case in cases if "early_stopping" not in case[1]]
    for outputs in run_in_layout(ranks, generate, layout, cases):
        for (path, settings, *_, expected), ids in zip(cases, outputs, strict=True):
            assert torch.equal(ids, expected), f"{path.name}, {settings}"


def test_without_a_cache_the_same_is_generated(cases):
    for ours, (*_, expected) in zip(generate(cases, {}, use_cache=False), cases, strict=True):
        assert torch.equal(ours, expected)


POSITIONS = {
    **{
        f"rotary, {kind}": scaling for kind, scaling in test_llama.ROPE.items() if kind != "dynamic"
    },
    "ALiBi": MPTConfig(**SIZES),
    "learned": tiny_config(max_positions=64),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_cached_and_uncached_generation_agree(name):
    config = POSITIONS[name]
    if name.startswith("rotary"):
        config = LlamaConfig(**SIZES, kv_heads=2, ffn_size=48, rope_scaling=config)
    model = megazoo.from_config(config, seed=5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    ids, mask = prompts()
    for settings in SETTINGS.values():
        settings = {"max_new_tokens": NEW, "eos_token_id": 2, **settings}
        cached = model.generate(ids, mask, **settings)
        assert torch.equal(cached, model.generate(ids, mask, use_cache=False, **settings))
    greedy = model.generate(ids[:1], max_new_tokens=NEW)[0, 9:]  # row 0 has no padding
    again = model(torch.cat([ids[:1], greedy[None, :-1]], dim=1)).logits.argmax(dim=-1)[0, 8:]
    assert torch.equal(again, greedy)


def test_dynamic_scaling_past_the_context_is_the_uncached_result():
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    model = megazoo.from_config(
        LlamaConfig(**{**SIZES, "max_positions": 16}, ffn_size=48, rope_scaling=scaling)
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    ids = prompts()[0][:1]
    out = model.generate(ids, max_new_tokens=30)
    for length in range(9, 39):
        assert model(out[:, :length]).logits[0, -1].argmax() == out[0, length]


@pytest.mark.parametrize("name", [name for name in test_llama.ROPE if name != "llama3"])
def test_scaled_rotary_generates_past_the_models_positions_what_transformers_does(name):
    """With and without a cache; dynamic scaling, of which transformers' cache keeps what it turned
    before, without."""
    sizes = {**SIZES, "max_positions": 32, "kv_heads": 2, "ffn_size": 48}
    config = LlamaConfig(**sizes, rope_scaling=test_llama.ROPE[name])
    hf, model = test_llama.hugging_face_model(config), megazoo.from_config(config)
    weights = test_llama.global_tensors(hf, config)
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


def test_top_k_and_top_p_keep_the_tokens_that_transformers_keeps():
    generator = torch.Generator().manual_seed(0)
    for trial in range(200):
        scores = torch.randn(3, 50, generator=generator) * 3
        if trial % 2:
            scores = scores.round()  # ties
        k, p = 1 + trial % 60, (trial % 19 + 1) / 20
        ours = keep_likely(scores, GenerationSettings(temperature=0.7, top_k=k, top_p=p))
        theirs = TopPLogitsWarper(p)(None, TopKLogitsWarper(k)(None, scores / 0.7))
        assert torch.equal(ours.isinf(), theirs.isinf())
        assert torch.equal(ours, theirs)
    assert torch.equal(keep_likely(scores, GenerationSettings(top_k=0)), scores)
    for p in (0.25, 0.5, 0.75):  # sums that are p to the bit
        ours = keep_likely(torch.zeros(1, 4), GenerationSettings(top_k=0, top_p=p))
        assert torch.equal(ours, TopPLogitsWarper(p)(None, torch.zeros(1, 4)))


def test_draws_follow_the_probabilities():
    scores = torch.tensor([[1.0, -torch.inf, 2.0, 0.0, -torch.inf]])
    uniform = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    tokens = draw(scores.expand(100_000, -1), uniform)
    shares = tokens.bincount(minlength=5) / 100_000
    assert (shares - scores[0].softmax(0)).abs().max() < 1e-4
    assert shares[1] == shares[4] == 0
    assert draw(scores, torch.zeros(1, dtype=torch.float64)) == 0
    assert draw(scores, torch.tensor([1 - 2**-53], dtype=torch.float64)) == 3


def sample(layout, seed=7, **more):
    model = megazoo.from_config(tiny_config(max_positions=64), context(**layout), seed=3)
    ids, mask = prompts(batch=5)
    settings = {
        "do_sample": True,
        "temperature": 1.5,
        "top_k": 40,
        "top_p": 0.9,
        "max_new_tokens": 20,
    }
    return model.generate(ids, mask, seed=seed, **settings, eos_token_id=[4, 9], **more)


@pytest.mark.parametrize(
    "layout",
    [
        dict(tp=2),
        dict(pp=4),
        dict(dp=2),
        dict(tp=2, pp=2),
        dict(pp=2, dp=2),
        dict(tp=2, sp=True),
        dict(dp=8),
        dict(pp=2, v=2),
    ],
    ids=layout_name,
)
def test_a_seed_draws_the_same_tokens_in_every_layout(ranks, layout):
    expected = sample({}, repetition_penalty=1.3, min_new_tokens=3)
    for ids in run_in_layout(ranks, sample, layout, repetition_penalty=1.3, min_new_tokens=3):
        assert torch.equal(ids, expected)


def test_another_seed_draws_other_tokens_and_rows_are_independent():
    first, other = sample({}), sample({}, seed=8)
    assert torch.equal(first, sample({}))
    assert not torch.equal(first, other)
    model = megazoo.from_config(tiny_config(max_positions=64), seed=3)
    same = prompts(batch=1)[0].expand(4, -1)
    rows = model.generate(same, do_sample=True, top_k=0, max_new_tokens=20)
    assert len(rows.unique(dim=0)) == 4
    assert torch.equal(
        rows[:2], model.generate(same[:2], do_sample=True, top_k=0, max_new_tokens=20)
    )


def test_penalty_and_least_length_equal_transformers(tmp_path):
    hf = FAMILIES["llama"]()
    hf.save_pretrained(tmp_path)
    model = megazoo.from_pretrained(tmp_path)
    for beams in (1, 3):
        settings = {
            "max_new_tokens": NEW,
            "eos_token_id": END,
            "pad_token_id": PAD,
            "num_beams": beams,
        }
        for extra in (
            {"repetition_penalty": 1.4},
            {"min_new_tokens": 10},
            {"repetition_penalty": 0.7},
        ):
            for seed in range(100):
                ids = prompts(seed, batch=2)[0]
                expected, margin = of_transformers(
                    hf, ids, torch.ones_like(ids), **settings, **extra
                )
                if margin > 2e-5:
                    break
            assert margin > 2e-5
            assert torch.equal(model.generate(ids, **settings, **extra), expected)


REPEATS = {
    "greedy, n-grams of 2": {"no_repeat_ngram_size": 2},
    "greedy, n-grams of 1": {"no_repeat_ngram_size": 1, "max_new_tokens": 20},
    "greedy, n-grams and penalty": {"no_repeat_ngram_size": 3, "repetition_penalty": 0.7, "min_new_tokens": 8},
    "beams, n-grams of 2": {"no_repeat_ngram_size": 2, "num_beams": 3},
    "beams, all of them": {"num_beams": 3, "num_return_sequences": 3, "eos_token_id": END},
    "beams, two of them, n-grams": {"num_beams": 4, "num_return_sequences": 2, "no_repeat_ngram_size": 3},
    "beams, early, two of them": {
        "num_beams": 3, "num_return_sequences": 2, "eos_token_id": END, "early_stopping": True, "length_penalty": 2.0,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def repeats(tmp_path_factory):
    """What transformers generates with settings that forbid repetition, or return several rows."""
    hf, path, made = repetitive(FAMILIES["llama"]()), tmp_path_factory.mktemp("repeats"), []
    hf.save_pretrained(path)
    for name, settings in REPEATS.items():
        settings = {"max_new_tokens": NEW, "pad_token_id": PAD, "eos_token_id": 60, **settings}
        for seed in range(100):
            ids = prompts(seed, batch=3)[0]
            ids[:, 3:6] = ids[:, 6:]  # a prompt repeats itself
            expected, margin = of_transformers(hf, ids, torch.ones_like(ids), **settings)
            if margin > 2e-5:
                break
        else:
            raise AssertionError(f"no prompts for {name}")
        free = {key: value for key, value in settings.items() if key != "no_repeat_ngram_size"}
        assert free == settings or not torch.equal(
            expected, hf.generate(ids, do_sample=False, **free)
        ), name
        made.append((path, settings, ids, None, expected))
    return made


def repetitive(hf):
    """A model of transformers that repeats itself soon: the output head is nearly the embedding."""
    with torch.no_grad():
        hf.lm_head.weight.lerp_(hf.model.embed_tokens.weight, 0.8)
    return hf


@pytest.mark.parametrize(
    "layout", [dict(), dict(tp=2), dict(pp=2), dict(dp=2), dict(pp=4)], ids=layout_name
)
def test_repetition_rules_and_several_rows_equal_transformers(ranks, repeats, layout):
    for outputs in run_in_layout(ranks, generate, layout, repeats):
        for (*_, expected), ids, name in zip(repeats, outputs, REPEATS, strict=True):
            assert torch.equal(ids, expected), name
    if not layout:
        for (*_, expected), ids in zip(
            repeats, generate(repeats, {}, use_cache=False), strict=True
        ):
            assert torch.equal(ids, expected)


def test_no_repeated_tokens_are_those_of_transformers():
    generator = torch.Generator().manual_seed(0)
    for trial in range(100):
        tokens = torch.randint(0, 6, (4, 1 + trial % 12), generator=generator)
        for size in (1, 2, 3, 4):
            theirs = NoRepeatNGramLogitsProcessor(size)(tokens, torch.zeros(4, 6)).isinf()
            assert torch.equal(repeating(tokens, size, 6), theirs)


def test_where_the_rule_would_forbid_all_tokens_it_does_not_hold():
    model = megazoo.from_config(tiny_config(max_positions=100), seed=3)
    ids = prompts(batch=2)[0]
    for how in ({}, {"do_sample": True}):
        new = model.generate(ids, max_new_tokens=80, no_repeat_ngram_size=1, **how)
        assert 0 <= new.min() <= new.max() < 61
        for row in new:
            left = 61 - len(row[:9].unique())
            assert len(row[9 : 9 + left].unique()) == left


def test_max_length_counts_the_prompt_as_transformers_does(tmp_path):
    hf = FAMILIES["gpt2"]()
    hf.save_pretrained(tmp_path)
    model = megazoo.from_pretrained(tmp_path)
    ids, mask = prompts()
    for beams in (1, 2):
        settings = {"max_length": 20, "num_beams": beams, "pad_token_id": PAD, "eos_token_id": 60}
        expected, margin = of_transformers(hf, ids, mask, **settings)
        assert margin > 1e-5
        assert torch.equal(model.generate(ids, mask, **settings), expected)
    # without either, 20 new ones
    assert model.generate(ids, mask, eos_token_id=[]).shape == (4, 29)


def several(layout, count, **more):
    model = megazoo.from_config(tiny_config(max_positions=64), context(**layout), seed=3)
    ids, mask = prompts(batch=3)
    settings = {
        "do_sample": True,
        "top_k": 0,
        "max_new_tokens": 16,
        "eos_token_id": [4, 9],
        "seed": 5,
    }
    return model.generate(ids, mask, num_return_sequences=count, **settings, **more)


@pytest.mark.parametrize(
    "layout",
    [dict(), dict(tp=2), dict(pp=2), dict(dp=2), dict(pp=2, dp=2), dict(dp=4)],
    ids=layout_name,
)
def test_several_draws_of_a_prompt_are_the_same_in_every_layout(ranks, layout):
    expected, ids = several({}, 4), prompts(batch=3)[0]
    assert torch.equal(expected[:, :9], ids.repeat_interleave(4, 0))
    assert len(expected.unique(dim=0)) == 12
    for fewer in (1, 2):  # are the first of more
        rows = several({}, fewer)
        kept = expected.view(3, 4, -1)[:, :fewer].flatten(0, 1)
        assert torch.equal(rows, kept[:, : rows.shape[1]])
    rules = {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2}
    with_rules = several({}, 4, use_cache=False, **rules)
    assert not torch.equal(with_rules, expected)
    for found in run_in_layout(ranks, several_each_way, layout, rules):
        assert torch.equal(found[0], expected)
        assert torch.equal(found[1], with_rules)


def several_each_way(rules, layout):
    return several(layout, 4), several(layout, 4, **rules)


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
    made = []
    for way in ways:
        for use_cache in (True, False):
            made.append(
                model.generate(
                    ids, mask, max_new_tokens=8, eos_token_id=7, use_cache=use_cache, **way
                )
            )
    return [len(stage.layers) for stage in model.stages], made


@pytest.mark.parametrize(
    "layout", [dict(pp=2), dict(pp=2, dp=4), dict(dp=4), dict(tp=2, pp=2)], ids=layout_name
)
def test_a_stage_without_layers_and_a_replica_without_rows_generate_too(ranks, layout):
    expected = on_stages_without_layers({})[1]
    for rank, (layers, made) in enumerate(run_in_layout(ranks, on_stages_without_layers, layout)):
        assert layers == [2 if rank < world(layout) // layout.get("pp", 1) else 0]
        assert len(made) == len(expected)
        assert all(torch.equal(*pair) for pair in zip(made, expected, strict=True))


def test_the_checkpoint_says_what_ends_and_pads(tmp_path):
    hf = FAMILIES["gpt2"]()
    hf.generation_config.eos_token_id, hf.generation_config.pad_token_id = END, PAD
    hf.save_pretrained(tmp_path / "hf")
    ids, mask = prompts()
    expected = hf.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    model = megazoo.from_pretrained(tmp_path / "hf")
    assert torch.equal(model.generate(ids, mask, max_new_tokens=NEW), expected)
    model.save_parallelized(tmp_path / "shards")
    again = megazoo.from_parallelized(tmp_path / "shards")
    assert torch.equal(again.generate(ids, mask, max_new_tokens=NEW), expected)


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


class Letters:
    """A tokenizer of 61 letters."""

    def decode(self, ids):
        return "".join(chr(65 + token) for token in ids)


@pytest.mark.parametrize("beams", [1, 3])
def test_stop_strings_end_a_row(beams):
    model = megazoo.from_config(tiny_config(max_positions=64), seed=3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    ids, letters = prompts(batch=2)[0], Letters()
    free = model.generate(ids, max_new_tokens=20)[:, 9:]
    text = letters.decode(free[0].tolist())
    stop = text[6:9]
    ends = text.index(stop) + 3
    if beams == 1:
        out = model.generate(
            ids, max_new_tokens=20, pad_token_id=PAD, stop=[stop, "~~"], tokenizer=letters
        )[:, 9:]
        assert torch.equal(out[0, :ends], free[0, :ends])
        assert (out[0, ends:] == PAD).all()
    else:
        out = model.generate(
            ids, max_new_tokens=20, stop=stop, num_beams=3, early_stopping=True, tokenizer=letters
        )
        row = letters.decode(out[0, 9:].tolist()).rstrip("A")  # padded with token 0
        assert stop not in row[:-1]


class Kept:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, ids):
        self.tokens += ids.tolist()

    def end(self):
        self.ended = True


def streamed(layout):
    model = megazoo.from_config(tiny_config(max_positions=64), context(**layout), seed=3)
    streamer = Kept()
    out = model.generate(prompts()[0][:1], max_new_tokens=10, streamer=streamer)
    return streamer.tokens, streamer.ended, out


@pytest.mark.parametrize("layout", [dict(), dict(tp=2, pp=2)], ids=layout_name)
def test_a_streamer_gets_each_token(ranks, layout):
    for tokens, ended, out in run_in_layout(ranks, streamed, layout):
        assert ended
        assert tokens == out[0, 9:].tolist()


def test_a_streamer_gets_the_row_of_another_replica(ranks):
    for tokens, ended, out in ranks(streamed, 2, dict(dp=2)):
        assert ended
        assert tokens == out[0, 9:].tolist()


def dynamic(layout):
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    config = LlamaConfig(**{**SIZES, "max_positions": 12}, ffn_size=48, rope_scaling=scaling)
    model = megazoo.from_config(config, context(**layout), seed=4)
    ids, mask = prompts(batch=2)
    return model.generate(ids, mask.roll(1, 0), max_new_tokens=30)


@pytest.mark.parametrize("layout", [dict(pp=2), dict(dp=2)], ids=layout_name)
def test_dynamic_scaling_is_that_of_the_whole_batch(ranks, layout):
    expected = dynamic({})
    for ids in ranks(dynamic, world(layout), layout):
        assert torch.equal(ids, expected)


def test_settings_in_all_their_forms():
    plain = GenerationSettings(stop=None, top_k=None, top_p=None, eos_token_id=torch.tensor(3))
    assert (plain.stop, plain.top_k, plain.top_p, plain.eos_token_id) == ((), 0, 1.0, (3,))
    assert GenerationSettings(stop=["", "a"], eos_token_id=[1, 2]).stop == ("a",)
    for wrong in ({"num_beams": 2.0}, {"max_new_tokens": "3"}):
        with pytest.raises(UserError, match="is not a whole number"):
            GenerationSettings(**wrong)


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
    return [tuple(group.cache._kept.shape) for group in groups]


def test_the_cache_holds_the_ranks_heads_and_layers_for_all_tokens(ranks):
    whole = cache_sizes({})
    # layers, keys and values, rows, KV heads, 9 + 10 - 1 tokens, head size
    assert whole == [(5, 2, 2, 2, 18, 8)]
    for rank, sizes in enumerate(ranks(cache_sizes, 4, dict(tp=2, pp=2))):
        assert sizes == [((3, 2)[rank // 2], 2, 1, 1, 18, 8)] * 2  # in two groups of one row each


WRONG = {
    "an over-long prompt": (
        {"max_new_tokens": 60},
        "a prompt of 9 tokens and 60 new ones exceed .* 64: at most 55",
    ),
    "a temperature of 0": ({"temperature": 0.0}, "temperature 0.0 is out of range"),
    "top_p": ({"top_p": 1.5}, "top_p 1.5 is out of range"),
    "beams that sample": ({"num_beams": 2, "do_sample": True}, "exclude each other"),
    "a misspelling": (
        {"max_new_token": 3},
        "generate has no max_new_token; did you mean max_new_tokens",
    ),
    "an end outside the vocabulary": ({"eos_token_id": 61}, "token 61 .* vocabulary of 61"),
    "a stop without its tokenizer": ({"stop": "x"}, "stop needs the tokenizer"),
    "padding on the right": (
        {"attention_mask": torch.tensor([[1] * 9, [1] * 8 + [0]])},
        "row 1 ends with padding",
    ),
    "a streamer for two": ({"streamer": Kept()}, "a streamer takes one row"),
    "two lengths": (
        {"max_length": 20, "max_new_tokens": 3},
        "max_new_tokens and max_length exclude each other: give",
    ),
    "no room": ({"max_length": 9}, "max_length 9 leaves no new token after a prompt of 9"),
    "an over-long max_length": (
        {"max_length": 65},
        "a prompt of 9 tokens and 56 new ones exceed .* 64: at most 55",
    ),
    "a length of 2.5": ({"max_length": 2.5}, "max_length 2.5 is not a whole number"),
    "greedy copies": (
        {"num_return_sequences": 2},
        "num_return_sequences 2 needs do_sample, or num_beams of at least",
    ),
    "more than beams": (
        {"num_beams": 2, "num_return_sequences": 3},
        "num_return_sequences 3 needs do_sample, or",
    ),
    "no rows": ({"num_return_sequences": 0}, "num_return_sequences 0 is out of range"),
    "a negative n-gram": ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size -1 is out of range"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name):
    arguments, message = WRONG[name]
    model = megazoo.from_config(tiny_config(max_positions=64))
    with pytest.raises(UserError, match=message):
        model.generate(prompts(batch=2)[0], **arguments)


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
