"""The settings of generation: rules against repetition, lengths, what ends a row, streamers, and
what is refused."""

import json
import re
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import NoRepeatNGramLogitsProcessor

import megazoo
from megazoo.errors import Advice, UserError
from megazoo.generate import GenerationSettings
from megazoo.generate.decoding import repeating
from tests.support.generation import (
    END,
    FAMILIES,
    NEW,
    PAD,
    decided,
    generate,
    of_transformers,
    prompts,
)
from tests.support.training import context, layout_name, run_in_layout, tiny_config


def test_penalty_and_least_length_equal_transformers(tmp_path):
    hf = FAMILIES["llama"]()
    hf.save_pretrained(tmp_path)
    model = megazoo.from_pretrained(tmp_path)
    for beams in (1, 3):
        settings = dict(max_new_tokens=NEW, eos_token_id=END, pad_token_id=PAD, num_beams=beams)
        for extra in (
            {"repetition_penalty": 1.4},
            {"min_new_tokens": 10},
            {"repetition_penalty": 0.7},
        ):
            given = {**settings, **extra}
            ids, _, expected = decided(hf, lambda seed: (prompts(seed, 2)[0], None), 2e-5, **given)
            assert torch.equal(model.generate(ids, **settings, **extra), expected)


REPEATS = {
    "greedy, n-grams of 2": dict(no_repeat_ngram_size=2),
    "greedy, n-grams of 1": dict(no_repeat_ngram_size=1, max_new_tokens=20),
    "greedy, n-grams and penalty": dict(
        no_repeat_ngram_size=3, repetition_penalty=0.7, min_new_tokens=8
    ),
    "beams, n-grams of 2": dict(no_repeat_ngram_size=2, num_beams=3),
    "beams, all of them": dict(num_beams=3, num_return_sequences=3, eos_token_id=END),
    "beams, two of them, n-grams": dict(
        num_beams=4, num_return_sequences=2, no_repeat_ngram_size=3
    ),
    "beams, early, two of them": dict(
        num_beams=3, num_return_sequences=2, eos_token_id=END, early_stopping=True,
        length_penalty=2.0,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def repeats(tmp_path_factory):
    """What transformers generates with settings that forbid repetition, or return several rows."""
    hf, path, made = repetitive(FAMILIES["llama"]()), tmp_path_factory.mktemp("repeats"), []
    hf.save_pretrained(path)
    for name, settings in REPEATS.items():
        settings = {"max_new_tokens": NEW, "pad_token_id": PAD, "eos_token_id": 60, **settings}
        ids, _, expected = decided(hf, repeated_prompts, 2e-5, name, **settings)
        free = {key: value for key, value in settings.items() if key != "no_repeat_ngram_size"}
        assert free == settings or not torch.equal(
            expected, hf.generate(ids, do_sample=False, **free)
        ), name
        made.append((path, settings, ids, None, expected))
    return made


def repeated_prompts(seed):
    """Prompts that repeat themselves."""
    ids = prompts(seed, batch=3)[0]
    ids[:, 3:6] = ids[:, 6:]
    return ids, None


def repetitive(hf):
    """A model of transformers that repeats itself soon: the output head is nearly the embedding."""
    with torch.no_grad():
        hf.lm_head.weight.lerp_(hf.model.embed_tokens.weight, 0.8)
    return hf


@pytest.mark.parametrize(
    "layout",
    [
        dict(),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (dict(tp=2, pp=2), dict(dp=2), dict(tp=2), dict(pp=2), dict(pp=4))
        ),
    ],
    ids=layout_name,
)
def test_repetition_rules_and_several_rows_equal_transformers(ranks, repeats, layout):
    for outputs in run_in_layout(ranks, generate, layout, repeats):
        for (*_, expected), ids, name in zip(repeats, outputs, REPEATS, strict=True):
            assert torch.equal(ids, expected), name
    if not layout:
        without_a_cache = generate(repeats, {}, use_cache=False)
        for (*_, expected), ids, name in zip(repeats, without_a_cache, REPEATS, strict=True):
            assert torch.equal(ids, expected), name


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


def test_the_checkpoint_says_what_ends_and_pads(tmp_path):
    hf = FAMILIES["gpt2"]()
    hf.generation_config.eos_token_id, hf.generation_config.pad_token_id = END, PAD
    hf.save_pretrained(tmp_path / "hf")
    ids, mask, expected = decided(hf, prompts, 1e-5, max_new_tokens=NEW)
    model = megazoo.from_pretrained(tmp_path / "hf")
    assert torch.equal(model.generate(ids, mask, max_new_tokens=NEW), expected)
    model.save_parallelized(tmp_path / "shards")
    again = megazoo.from_parallelized(tmp_path / "shards")
    assert torch.equal(again.generate(ids, mask, max_new_tokens=NEW), expected)


FILES = [
    {"max_length": 15},
    {"max_length": 12, "max_new_tokens": 5},
    {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True, "max_new_tokens": 8},
    {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "max_new_tokens": 12},
    {"do_sample": True, "top_k": 1, "temperature": 0.6, "max_new_tokens": 8},
    {"temperature": 0.01, "top_p": 0.5, "max_new_tokens": 8},  # of samples, which nothing draws
    {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 6},
    {"min_length": 16, "max_new_tokens": 12},
    {"min_length": 16, "min_new_tokens": 2, "max_new_tokens": 12},
]


@pytest.mark.parametrize("file", FILES)
def test_the_settings_of_generation_config_apply_as_in_transformers(file, tmp_path):
    hf = FAMILIES["llama"]()
    hf.save_pretrained(tmp_path)
    config = {**file, "eos_token_id": END, "pad_token_id": PAD}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    hf.generation_config = GenerationConfig.from_pretrained(tmp_path)
    model = megazoo.from_pretrained(tmp_path)
    ids, mask = prompts()
    expected = hf.generate(ids, attention_mask=mask)
    assert torch.equal(model.generate(ids, mask), expected)
    greedy = {"do_sample": False, "num_beams": 1, "max_new_tokens": 3, "num_return_sequences": 1}
    expected = hf.generate(ids, attention_mask=mask, **greedy)
    assert torch.equal(model.generate(ids, mask, **greedy), expected)


def test_settings_that_are_missing_here_are_named_once():
    saved = {"min_p": 0.1, "typical_p": 1.0, "suppress_tokens": [3], "guidance_scale": None}
    for given, named in (
        ({"do_sample": True}, "min_p 0.1, suppress_tokens"),
        ({}, "suppress_tokens"),
    ):
        with pytest.warns(Advice) as told:
            GenerationSettings.of(given, saved)
        (line,) = [str(each.message) for each in told]
        assert line == f"generation_config.json sets {named} a list: megazoo generates without it"
    for given, saved, name in (
        ({"num_beams": 2}, {"do_sample": True}, "do_sample"),
        ({"do_sample": True}, {"num_beams": 2}, "num_beams"),
    ):
        with pytest.raises(
            UserError, match=rf"^{name} of generation_config\.json: .*pass do_sample"
        ):
            GenerationSettings.of(given, saved)
    with pytest.raises(UserError, match=r"^generation_config\.json: temperature 'hot' is not"):
        GenerationSettings.of({"do_sample": True}, {"temperature": "hot"})


@pytest.mark.parametrize("pad", [-1, 10**6])
def test_ids_outside_the_vocabulary_end_nothing_and_pad(pad, tmp_path):
    """Rows of a batch that have ended are padded, although the id has no embedding."""
    hf = FAMILIES["llama"]()
    hf.save_pretrained(tmp_path)
    model = megazoo.from_pretrained(tmp_path)
    settings = {"max_new_tokens": NEW, "repetition_penalty": 1.1, "no_repeat_ngram_size": 9}
    ids, mask, expected = decided(hf, prompts, 1e-5, eos_token_id=END, pad_token_id=PAD, **settings)
    model.generation = {"eos_token_id": [*END, -1, 10**6], "pad_token_id": pad}
    new = expected[:, ids.shape[1] :]
    padding = torch.cat([new.new_zeros(4, 1), (new == torch.tensor(END)[:, None, None]).any(0)], 1)
    ended = padding[:, :-1].cumsum(1) > 0
    assert ended.any()
    out = model.generate(ids, mask, **settings)
    assert torch.equal(out[:, ids.shape[1] :], new.masked_fill(ended, pad))
    beams = model.generate(ids, mask, num_beams=2, **settings)
    assert set(beams[:, ids.shape[1] :].flatten().tolist()) <= {*range(61), pad}


def test_older_configs_have_the_settings_of_generation(tmp_path):
    hf = FAMILIES["llama"]()
    hf.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"max_length": 14, "repetition_penalty": 1.8, "no_repeat_ngram_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids, mask = prompts()
    expected = theirs.generate(ids, attention_mask=mask)
    assert expected.shape[1] == 14
    with warnings.catch_warnings():
        warnings.simplefilter("error", Advice)
        model = megazoo.from_pretrained(tmp_path)
    assert torch.equal(model.generate(ids, mask), expected)


def test_lengths_of_a_file_are_limited_to_those_of_the_model():
    model = megazoo.from_config(tiny_config(max_positions=20))
    ids, _ = prompts(batch=2)
    for file in ({"max_new_tokens": 4096}, {"max_length": 4096}):
        model.generation = file
        assert model.generate(ids).shape == (2, 20)
    model.generation = {"min_new_tokens": 30}
    assert model.generate(ids, max_new_tokens=3).shape == (2, 12)
    with pytest.raises(UserError, match="min_new_tokens 30 is out of range"):
        model.generate(ids, max_new_tokens=3, min_new_tokens=30)


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


@pytest.mark.parametrize("layout", [dict(), dict(tp=2, pp=2), dict(dp=2)], ids=layout_name)
def test_a_streamer_gets_each_token(ranks, layout):
    """Also where another replica has the row."""
    for tokens, ended, out in run_in_layout(ranks, streamed, layout):
        assert ended
        assert tokens == out[0, 9:].tolist()


def test_settings_in_all_their_forms():
    plain = GenerationSettings(stop=None, top_k=None, top_p=None, eos_token_id=torch.tensor(3))
    assert (plain.stop, plain.top_k, plain.top_p, plain.eos_token_id) == ((), 0, 1.0, (3,))
    assert GenerationSettings(stop=["", "a"], eos_token_id=[1, 2]).stop == ("a",)
    for wrong in ({"num_beams": 2.0}, {"max_new_tokens": "3"}):
        with pytest.raises(UserError, match="is not a whole number"):
            GenerationSettings(**wrong)


WRONG = [
    # lengths
    ({"max_new_tokens": 60}, "a prompt of 9 tokens and 60 new ones exceed .* 64: at most 55"),
    ({"max_length": 65}, "a prompt of 9 tokens and 56 new ones exceed .* 64: at most 55"),
    ({"max_length": 9}, "max_length 9 leaves no new token after a prompt of 9"),
    ({"max_length": 2.5}, "max_length 2.5 is not a whole number"),
    (
        {"max_length": 20, "max_new_tokens": 3},
        "max_new_tokens and max_length exclude each other: use one",
    ),
    # what is drawn, and how many
    ({"temperature": 0.0}, "temperature 0.0 is out of range"),
    ({"top_p": 1.5}, "top_p 1.5 is out of range"),
    ({"num_beams": 2, "do_sample": True}, "exclude each other"),
    (
        {"num_return_sequences": 2},
        "num_return_sequences 2 needs do_sample=True, or num_beams of at least",
    ),
    (
        {"num_beams": 2, "num_return_sequences": 3},
        "num_return_sequences 3 needs do_sample=True, or",
    ),
    ({"num_return_sequences": 0}, "num_return_sequences 0 is out of range"),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size -1 is out of range"),
    # names, what ends, padding on the right, and a streamer for two rows
    ({"max_new_token": 3}, "generate has no argument max_new_token; did you mean max_new_tokens"),
    ({"do_sample": 1}, "do_sample 1 is neither True nor False"),
    ({"stop": "x"}, "stop also needs the argument tokenizer"),
    ({"attention_mask": torch.tensor([[1] * 9, [1] * 8 + [0]])}, "row 1 ends with padding"),
    ({"streamer": Kept()}, "a streamer supports one row"),
]


def test_what_cannot_be_is_refused():
    model = megazoo.from_config(tiny_config(max_positions=64))
    for arguments, message in WRONG:
        with pytest.raises(UserError) as refused:
            model.generate(prompts(batch=2)[0], **arguments)
        assert re.search(message, str(refused.value)), arguments
