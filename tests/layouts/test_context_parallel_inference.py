"""Generation and scoring on a context-parallel context are those of one process, and leave the
model as it was."""

from dataclasses import replace
from itertools import product

import pytest
import torch

import megazoo
from megazoo.errors import UserError
from megazoo.evaluation.scoring import evaluate_texts, score, score_choices
from megazoo.tokenizer import ByteTokenizer
from tests.support.context_parallel import batch_of, cp_name, model_in, rows_of_replica
from tests.support.generation import PAD, prompts
from tests.support.training import MODELS, context, tiny_config, world

SIZES = dict(layers=2, max_positions=64, vocab_size=300)
CONFIGS = {
    "gpt2": tiny_config(**SIZES),
    "llama": replace(MODELS["llama"], **SIZES),
    "mpt": replace(MODELS["mpt"], **SIZES),
}
LAYOUTS = [
    dict(cp=2),
    dict(cp=3, method="ulysses"),
    dict(dp=2, cp=2),
    dict(tp=2, cp=2, sp=True, method="ulysses"),
    dict(pp=2, cp=2),
]
SETTINGS = {
    "greedy": {},
    "sampling": dict(do_sample=True, seed=3, top_k=20),
    "several samples": dict(do_sample=True, seed=4, num_return_sequences=2),
    "beams": dict(num_beams=3, num_return_sequences=2, eos_token_id=60),
    "no cache": dict(use_cache=False),
}


class Tokens:
    """A streamer."""

    def __init__(self):
        self.tokens = []

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        self.tokens.append("end")


def generated(model) -> dict:
    ids, mask = prompts()
    out = {
        name: model.generate(ids, mask, max_new_tokens=8, pad_token_id=PAD, **settings).tolist()
        for name, settings in SETTINGS.items()
    }
    streamer = Tokens()
    out["one row"] = model.generate(ids[:1], max_new_tokens=8, streamer=streamer).tolist()
    return out | {"streamed": streamer.tokens}


def scored(model) -> list:
    batch, tokenizer = batch_of(2), ByteTokenizer()
    scores = score(model, batch["input_ids"], batch["targets"])
    choices = score_choices(model, tokenizer, [("a b", " c"), ("", "def"), ("x", "yz" * 9)])
    loss = evaluate_texts(model, tokenizer, ["some text " * 9, "", "é"], length=20, stride=7)
    numbers = scores.log_likelihood.tolist() + [choice[0] for choice in choices] + [loss.loss]
    exact = [scores.tokens.tolist(), scores.greedy.tolist(), [choice[1:] for choice in choices]]
    return [numbers, [*exact, loss.tokens, loss.bytes]]


def trained_around(config, layout: dict):
    """What is generated and scored, and the losses before, between and after."""
    ctx = context(**layout)
    model, losses = model_in(config, ctx), []
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 8  # so that the likeliest token is so by far
    optimizer = megazoo.optim.AdamW(model, lr=1e-3)
    contexts = [(module, module.ctx) for module in model.modules() if hasattr(module, "ctx")]

    def train(step):
        losses.append(model.train_batch(**rows_of_replica(batch_of(step), ctx)).item())
        optimizer.step()
        assert all(module.ctx is before for module, before in contexts)
        assert model.training

    train(0)
    texts = generated(model)
    train(1)
    scores = scored(model)
    train(2)
    for call in (
        lambda ids: model.generate(ids, max_new_tokens=3),
        lambda ids: score(model, ids, ids),
    ):
        with pytest.raises(UserError, match="outside the vocabulary"):
            call(torch.full((4, 5), 300))
    train(3)
    return texts, scores, losses


FAST = list(zip(["gpt2", "llama", "mpt", "llama", "mpt"], LAYOUTS, strict=True))
SLOW = [case for case in product(CONFIGS, LAYOUTS) if case not in FAST]


@pytest.mark.parametrize(
    ("name", "layout"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=cp_name,
)
def test_generation_and_scores_are_those_of_one_process(ranks, name, layout):
    texts, (numbers, exact), losses = trained_around(CONFIGS[name], {})
    assert texts["streamed"] == [*texts["one row"][0][9:], "end"]
    for theirs, scores, their_losses in ranks(trained_around, world(layout), CONFIGS[name], layout):
        assert theirs == texts
        assert scores[0] == pytest.approx(numbers, rel=1e-5)
        assert scores[1] == exact
        assert their_losses == pytest.approx(losses, rel=1e-5)
