"""HarnessModel answers lm-evaluation-harness as HFLM does on the same directories, in every
layout."""

import json
from itertools import product

import pytest
import torch

import megazoo
from megazoo.errors import UserError
from megazoo.evaluation import HarnessModel
from megazoo.tokenizer import ByteTokenizer
from tests.support.harness import (
    LENGTH,
    answers_in,
    asked,
    direct_answers,
    evaluated,
    ours,
    theirs,
    words,
)
from tests.support.harness_files import FAMILIES, write_family, write_tasks
from tests.support.sampling import marked_slow
from tests.support.training import layout_name, world


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("harness")
    return {family: write_family(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def answers(directories, tasks):
    """HFLM's, by family."""
    return {
        family: evaluated(theirs(directory, batch_size=1), tasks)
        for family, directory in directories.items()
    }


def assert_same(found: dict, expected: dict):
    assert list(found) == list(expected) == ["choices", "rolling", "writing", "chatting"]
    for name, (results, samples) in expected.items():
        for metric, value in results.items():
            mine = found[name][0][metric]
            if "perplexity" in metric or "bits" in metric:
                assert value == "N/A" or abs(mine - value) < 1e-5 * abs(value), (name, metric)
            else:
                assert mine == value, (name, metric)
        for (arguments, resps), sample in zip(found[name][1], samples, strict=True):
            assert arguments == sample[0]
            for mine, expected_ones in zip(resps, sample[1], strict=True):
                assert_same_answers(name, mine, expected_ones)


def assert_same_answers(kind: str, found: list, expected: list):
    for mine, wanted in zip(found, expected, strict=True):
        if kind == "choices":
            assert abs(mine[0] - wanted[0]) < 1e-4
            assert mine[1] == wanted[1]
        elif kind == "rolling":
            assert abs(mine - wanted) < 1e-4 + 1e-7 * abs(wanted)
        else:
            assert mine == wanted


@pytest.mark.parametrize("family", marked_slow(list(FAMILIES), lambda _, name: name == "llama"))
def test_one_process_answers_as_hflm(directories, tasks, answers, family):
    found = evaluated(ours(directories[family], batch_size=3), tasks)
    assert_same(found, answers[family])
    texts = [text for _, resps in found["writing"][1] for ((text,),) in [resps]]
    assert len(set(texts)) > 3


LAYOUTS = [dict(tp=2), dict(pp=2), dict(dp=2), dict(tp=2, pp=2)]


@pytest.mark.parametrize(
    ("family", "layout"),
    marked_slow(
        list(product(FAMILIES, LAYOUTS)),
        lambda _, case: case != ("llama", LAYOUTS[3]),
        name=lambda case: f"{case[0]}-{layout_name(case[1])}",
    ),
)
def test_every_layout_answers_as_hflm(ranks, directories, tasks, answers, family, layout):
    results = ranks(answers_in, world(layout), layout, directories[family], tasks)
    assert_same(results[0][0], answers[family])
    alone = direct_answers(ours(directories[family], batch_size=4))
    assert len(set(alone[2])) > 3, "draws in different batches differ"
    for _, direct in results:
        for kind, mine, one in zip(("choices", "rolling", "writing"), direct, alone, strict=True):
            assert_same_answers(kind, mine, one)


# What is easily got wrong, of each request by itself.


@pytest.fixture(scope="module", params=marked_slow(list(FAMILIES), lambda _, name: name != "gpt2"))
def both(request, directories):
    return of_both(directories[request.param])


def of_both(directory):
    # With its cache, HFLM mixes up requests that are one text, cut at different places.
    return ours(directory, batch_size=3), theirs(directory, batch_size=1, logits_cache=False)


def assert_both(both, kind: str, *arguments: tuple):
    mine, their = (getattr(model, kind)(asked(kind, *arguments)) for model in both)
    name = {"loglikelihood": "choices", "loglikelihood_rolling": "rolling"}.get(kind, "writing")
    assert_same_answers(name, mine, their)
    return mine


def test_boundaries_of_context_and_continuation(both):
    prefix = both[1].tokenizer.decode([both[1].prefix_token_id])
    contexts = ["", "def", "def ", "def  \n", "  def", words(2, 80), words(2, 80) + " ", prefix]
    contexts += [prefix + "def", "de", "\u00e9", "<|im_start|>user\n"]
    continuations = ["f self", " self", "x", " \u00e9 self", words(3, 12), prefix + "text", "  "]
    assert_both(
        both, "loglikelihood", *((a, b) for a in contexts for b in continuations if a + b != prefix)
    )


def test_greedy_continuations_are_told(both):
    settings = {"until": [], "max_gen_toks": 1}
    contexts = [words(n, 1 + n) for n in range(30)]
    texts = both[1].generate_until(
        asked("generate_until", *((text, settings) for text in contexts))
    )
    pairs = [(a, b) for a, b in zip(contexts, texts, strict=True) if b]
    results = assert_both(both, "loglikelihood", *pairs, *((a, b + "(") for a, b in pairs))
    assert {greedy for _, greedy in results} == {True, False}


def test_the_longest_continuation(both):
    mine, their = both
    text = words(4, 200)
    while len(mine.tok_encode(text, add_special_tokens=False)) > LENGTH:
        text = text[:-1]
    assert len(mine.tok_encode(text, add_special_tokens=False)) == LENGTH
    assert_both(both, "loglikelihood", ("", text))
    message = rf"'{text[:20]}.*has {LENGTH + 1} tokens: it must have from 1 to {LENGTH}"
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", r"\)")):
        mine.loglikelihood(asked("loglikelihood", ("", text + "\u1234"[:0] + "\x00")))
    with pytest.raises(AssertionError):
        their.loglikelihood(asked("loglikelihood", ("", text + "\x00")))
    for context_ in ("", "def"):
        with pytest.raises(UserError, match=rf"the continuation of '{context_}' is empty"):
            mine.loglikelihood(asked("loglikelihood", (context_, "")))

    # a context of spaces follows the prefix
    spaces, nothing = mine.loglikelihood(asked("loglikelihood", ("  ", "def"), ("", "  def")))
    assert spaces == pytest.approx(nothing, rel=1e-5)


def test_texts_of_all_lengths_are_rolled_over(both):
    texts = [words(5, n) for n in (1, 2, 30, 31, 32, 33, 34, 35, 60, 64, 66, 130)]
    lengths = {len(both[0].tok_encode(text)) for text in texts}
    assert min(lengths) < LENGTH < 2 * LENGTH < max(lengths)
    assert_both(both, "loglikelihood_rolling", *((text,) for text in ["", *texts]))


@pytest.mark.parametrize("every", [8, pytest.param(4, marks=pytest.mark.slow)])
def test_each_request_ends_by_its_own_rules(both, every):
    free = {"until": [], "max_gen_toks": 16}
    contexts = [words(6, 3), words(7, 50), "def", words(8, 9)]
    texts = assert_both(both, "generate_until", *((text, free) for text in contexts))
    pieces = {text[n : n + size] for text in texts for n in (1, 4, 6) for size in (1, 2, 3)}
    pieces = sorted(piece for piece in pieces if piece and "\ufffd" not in piece)
    assert max(map(len, pieces)) > 1
    requests = [
        (text, {"until": pieces[n::3][: 1 + n], "max_gen_toks": 5 + 4 * n})
        for n in range(3)
        for text in contexts
    ]
    requests += [(text, {"until": piece, "max_gen_toks": 16})
                 for text in contexts for piece in pieces[::every]]  # fmt: skip
    found = assert_both(both, "generate_until", *requests)
    assert len(set(found)) > 8
    assert "" in found or any(len(text) < 3 for text in found)


@pytest.mark.parametrize("family", marked_slow(list(FAMILIES), lambda _, name: name != "gpt2"))
def test_generation_settings_mean_the_same(directories, family):
    both = of_both(directories[family])
    for settings in (
        {"do_sample": False, "temperature": 0.7},
        {"temperature": 0.0},
        {"do_sample": True, "temperature": 0.7, "top_k": 1},
        {"temperature": 0.7, "top_k": 1},
        {"repetition_penalty": 5.0},
        {"num_beams": 2},
        {"max_new_tokens": 3},
    ):
        length = {} if "max_new_tokens" in settings else {"max_gen_toks": 10}
        request = {"until": ["\n"], **length, **settings}
        assert_both(both, "generate_until", *((words(n, 4), request) for n in range(3)))


def test_saved_settings_and_ends_hold(directories, tmp_path):
    """A penalty in generation_config.json, and an end of texts that is no special token."""
    path = write_family(tmp_path / "m", "gpt2")
    request = (
        "generate_until",
        *((words(n, 4), {"until": [], "max_gen_toks": 20}) for n in range(6)),
    )
    before = assert_both((ours(path), theirs(path)), *request)
    file = path / "generation_config.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps({**saved, "repetition_penalty": 3.0}))
    penalised = assert_both((ours(path), theirs(path)), *request)
    assert penalised != before
    ids = ours(path).tok_encode(penalised[0], add_special_tokens=False)
    end = ids[len(ids) // 2]
    file.write_text(json.dumps({**saved, "repetition_penalty": 3.0, "eos_token_id": [2, end]}))
    ended = assert_both((ours(path), theirs(path)), *request)
    assert ended != penalised
    assert any(len(a) < len(b) for a, b in zip(ended, penalised, strict=True))


def test_draws_follow_from_torchs_seed(directories):
    model = ours(directories["llama"], batch_size=2)
    sampled = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 2.0}
    requests = asked("generate_until", *(("def", sampled),) * 5)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(model.generate_until(requests))
    assert draws[0] == draws[1] != draws[2]
    assert len(set(draws[0])) == 5


def test_chat_templates_are_rendered_as_hflm_does(both):
    mine, their = both
    system, user = {"role": "system", "content": "Be kind."}, {"role": "user", "content": " Hi \n"}
    answer = {"role": "assistant", "content": "Hello "}
    for messages, prompt in [
        ([user], True),
        ([system, user], True),
        ([system, user, answer], False),
        ([user, system, answer], True),  # refused by the template: without the system
    ]:
        assert mine.apply_chat_template(messages, prompt) == their.apply_chat_template(
            messages, prompt
        )
    assert mine.chat_template(True) == their.chat_template(True)
    assert mine.tokenizer_name == their.tokenizer_name
    with pytest.raises(UserError, match="the system speaks first"):
        mine.tokenizer.apply_chat_template([user, system])


def test_what_can_not_be_is_refused_in_one_line(directories):
    model = ours(directories["gpt2"])
    for settings, message in {
        ("batch_size", 0): "batch_size 0 must be 1 or more",
        ("max_length", 0): "max_length 0 must be 1 or more",
        ("max_length", LENGTH + 1): f"max_length {LENGTH + 1} is more than the model's {LENGTH}",
        ("max_gen_toks", 1.5): "max_gen_toks must be a whole number, not 1.5",
    }.items():
        with pytest.raises(UserError, match=message):
            HarnessModel(model.model, model.tokenizer, **dict([settings]))
    for settings, message in [
        ({}, f"max_gen_toks 256 leaves no room for a prompt: the model supports {LENGTH} tokens"),
        ({"max_gen_toks": 4, "top_q": 1}, r"generate has no argument top_q; did you mean top_p\?"),
        ({"max_gen_toks": 4, "do_sample": True, "temperature": 0.0}, "temperature 0.0 is out"),
    ]:
        with pytest.raises(UserError, match=message):
            model.generate_until(asked("generate_until", ("def", settings)))
    with pytest.raises(UserError, match="the tokenizer byte has no chat template"):
        HarnessModel(model.model, ByteTokenizer()).apply_chat_template([])
    classifier = megazoo.from_pretrained(directories["gpt2"], num_labels=2)
    with pytest.raises(UserError, match="a classifier has no likelihoods of texts"):
        HarnessModel(classifier, model.tokenizer)


def test_a_shorter_max_length_holds(directories):
    pair = (
        ours(directories["mpt"], max_length=20),
        theirs(directories["mpt"], max_length=20, batch_size=1),
    )
    assert_both(pair, "loglikelihood", (words(1, 40), " self"))
    assert_both(pair, "loglikelihood_rolling", (words(1, 40),))
    long = {"until": [], "max_gen_toks": 9}
    assert_both(pair, "generate_until", (words(1, 40), long))


def test_the_tokenizers_end_of_a_text_ends_it(tmp_path):
    """Where generation_config.json names none."""
    path = write_family(tmp_path / "m", "gpt2")
    file = path / "generation_config.json"
    saved = json.loads(file.read_text())
    saved.pop("eos_token_id", None)
    file.write_text(json.dumps(saved))
    request = (
        "generate_until",
        *((words(n, 4), {"until": [], "max_gen_toks": 20}) for n in range(6)),
    )
    before = assert_both((ours(path), theirs(path, batch_size=1)), *request)
    letter = next(c for text in before for c in text[1:] if c.isascii() and c.isupper())
    settings = path / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token": letter}))
    ended = assert_both((ours(path), theirs(path, batch_size=1)), *request)
    assert any(len(a) < len(b) for a, b in zip(ended, before, strict=True))


def test_the_end_of_a_text_is_an_id_and_a_text(directories, monkeypatch):
    """Ordinary tokens may spell it; and that of the byte tokenizer has no text."""
    model = ours(directories["gpt2"])
    given = {}
    generate = model.model.generate
    monkeypatch.setattr(
        model.model, "generate", lambda *args, **how: given.update(how) or generate(*args, **how)
    )
    request = asked("generate_until", ("def", {"until": ["x"], "max_gen_toks": 2}))
    model.generate_until(request)
    assert (given["eos_token_id"], given["stop"]) == ((2,), ["x", "</s>"])
    HarnessModel(model.model, ByteTokenizer()).generate_until(request)
    assert (given["eos_token_id"], given["stop"]) == ((2, 256), ["x"])
