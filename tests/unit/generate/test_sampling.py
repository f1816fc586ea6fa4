"""Sampling: draws follow the probabilities, and are the same in every layout."""

from functools import cache

import pytest
import torch
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

import megazoo
from megazoo.generate import GenerationSettings
from megazoo.generate.decoding import BROKEN, GOES_ON, Sampler, draw, keep_likely
from tests.support.generation import prompts
from tests.support.training import context, layout_name, run_in_layout, tiny_config


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


@pytest.mark.parametrize("value", [torch.inf, torch.nan, -torch.inf, 3e38, -3e38])
def test_logits_that_are_not_finite_are_noticed_and_remembered(value):
    """Of all tokens, or of one, where -inf is a token that can't be chosen."""
    for places in (slice(None), slice(3, 4)):
        sampler = Sampler(
            GenerationSettings(max_new_tokens=3), torch.zeros(2, 1).long(), None, range(2)
        )
        logits = torch.zeros(2, 5)
        assert sampler.choose(logits).state == GOES_ON
        logits[1:, places] = value
        whole = torch.full((2, 5), value) if places == slice(None) else logits
        broken = not whole.amax().isfinite()
        assert sampler.choose(whole).state == (BROKEN if broken else GOES_ON)
        assert sampler.choose(torch.zeros(2, 5)).state == (BROKEN if broken else GOES_ON)
        assert sampler.broken is broken


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
    settings = dict(do_sample=True, temperature=1.5, top_k=40, top_p=0.9, max_new_tokens=20)
    return model.generate(ids, mask, seed=seed, **settings, eos_token_id=[4, 9], **more)


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


def several(layout, count, **more):
    model = megazoo.from_config(tiny_config(max_positions=64), context(**layout), seed=3)
    ids, mask = prompts(batch=3)
    settings = dict(do_sample=True, top_k=0, max_new_tokens=16, eos_token_id=[4, 9], seed=5)
    return model.generate(ids, mask, num_return_sequences=count, **settings, **more)


PENALTIES = {"repetition_penalty": 1.3, "min_new_tokens": 3}
RULES = {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2}


def test_several_draws_of_a_prompt_are_other_ones():
    rows, ids = several({}, 4), prompts(batch=3)[0]
    assert torch.equal(rows[:, :9], ids.repeat_interleave(4, 0))
    assert len(rows.unique(dim=0)) == 12
    for fewer in (1, 2):  # are the first of more
        first = several({}, fewer)
        kept = rows.view(3, 4, -1)[:, :fewer].flatten(0, 1)
        assert torch.equal(first, kept[:, : first.shape[1]])
    with_rules = several({}, 4, use_cache=False, **RULES)
    assert not torch.equal(with_rules, rows)
    assert torch.equal(several({}, 4, **RULES), with_rules)


def each_way(layout):
    return sample(layout, **PENALTIES), several(layout, 4), several(layout, 4, **RULES)


@cache
def in_one_process():
    return each_way({})


@pytest.mark.parametrize(
    "layout",
    [
        # also more replicas than prompts, and an uneven number of them
        *(dict(tp=2, sp=True), dict(pp=2, v=2), dict(dp=4)),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                dict(tp=2, pp=2),
                dict(pp=2, dp=2),
                *(dict(tp=2), dict(pp=2), dict(pp=4), dict(dp=2), dict(dp=8)),
            )
        ),
    ],
    ids=layout_name,
)
def test_a_seed_draws_the_same_tokens_in_every_layout(ranks, layout):
    expected = in_one_process()
    for found in run_in_layout(ranks, each_way, layout):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
