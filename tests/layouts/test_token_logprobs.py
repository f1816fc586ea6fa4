"""model.token_logprobs against torch in double precision: values in every layout, and the gradients
of a weighted sum where pp is 1. Five tokens make a piece."""

import copy
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch

import megazoo
from megazoo.errors import UserError
from megazoo.layers.embedding import VocabParallelHead
from megazoo.models.gemma2 import Gemma2Config
from megazoo.models.gpt2 import GPT2
from megazoo.models.llama import Llama
from megazoo.models.outputs import LanguageModelHead
from megazoo.testing import Layout
from tests.layouts.test_experts import MIXTRAL
from tests.support.context_parallel import ROWS, TOKENS, batch_of, rows_of_replica
from tests.support.layouts import (
    LONG,
    MODELS,
    in_layout,
    micro_batches,
    model_in,
    parts_of_gradients,
    short_pieces,
    sizes_of,
)
from tests.support.sampling import marked_slow
from tests.support.training import context, randomize, run_in_layout, worst_gradient
from tests.support.transformers_models import gpt2

GEMMA2 = Gemma2Config(
    **LONG, kv_heads=2, ffn_size=48, head_size=12, window=6, query_scalar=10, logit_cap=1.5
)
CONFIGS = {**MODELS, "gemma2": GEMMA2, "mixtral": MIXTRAL}
TOP = 7
WEIGHTS = torch.randn(ROWS, TOKENS, generator=torch.Generator().manual_seed(9))


def inputs_of(kind: str) -> dict:
    batch = batch_of(2, kind)
    del batch["targets"]
    return batch


def first_ones(batch: dict) -> torch.Tensor:
    """Where there is no token before a token, or no token."""
    mask = batch.get("attention_mask", torch.ones(ROWS, TOKENS))
    documents = batch.get("document_ids", torch.zeros(ROWS, TOKENS))
    found = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    for row in range(ROWS):
        for t in range(1, TOKENS):
            both = mask[row, t] and mask[row, t - 1]
            found[row, t] = not (both and documents[row, t] == documents[row, t - 1])
    return found


def from_logits(logits: torch.Tensor, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities of the tokens, and of all tokens after each position."""
    every = logits.double().log_softmax(-1)
    found = every[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    found = torch.cat([torch.zeros(ROWS, 1), found], dim=1)
    return found.masked_fill(first_ones(batch), 0), every


@cache
def expected(name: str, kind: str):
    model, batch = model_in(CONFIGS[name], context()), inputs_of(kind)
    if name != "mixtral":  # torch multiplies groups in fp32 at most
        model = copy.deepcopy(model).double()
    found, every = from_logits(model(**batch).logits, batch)
    (found * WEIGHTS).sum().backward()
    return found.detach(), every.detach(), parts_of_gradients(model)


def found_in(cases: list, layout: dict):
    """What a rank of a layout returns for each model and kind of batch."""
    ctx, results = context(**layout), []
    for name, kind in cases:
        model = model_in(CONFIGS[name], ctx)
        with short_pieces(), mock.patch.object(LanguageModelHead, "outputs", None):  # no logits
            found, values, ids = model.token_logprobs(**inputs_of(kind), top_k=TOP)
            assert found.dtype == values.dtype == torch.float32
            assert found.requires_grad == (ctx.pp_size == 1)
            if ctx.pp_size > 1:
                results.append((found.detach(), values, ids, None))
                continue
            (found * WEIGHTS).sum().backward()
        model.sync_gradients()
        results.append((found.detach(), values, ids, parts_of_gradients(model)))
    return results


KINDS = ("documents", "padding", "documents, padding")
DENSE = [
    ("llama", "documents"), ("mpt, learned positions", "documents, padding"), ("gemma2", "padding"),
]  # fmt: skip
LAYOUTS = [
    "tp1", "tp2", "tp2+sp", "cp2", "cp2+ulysses", "pp2", "ep2",
    "tp4", "tp2cp2+sp", "tp2cp2+ulysses", "pp2v2", "pp2v2+zb-v", "tp2pp2+sp", "cp2pp2", "pp2ep2",
]  # fmt: skip


@pytest.mark.parametrize("layout", marked_slow(LAYOUTS, lambda number, _: number > 6))
def test_they_are_those_of_double_precision(ranks, layout):
    cases = [("mixtral", "padding")] if "ep" in layout else DENSE
    cases = [*cases, ("mixtral", "padding")] if layout == "tp1" else cases
    results = in_layout(ranks, found_in, layout, cases)
    for number, (name, kind) in enumerate(cases):
        exact, every, gradients = expected(name, kind)
        is_token = inputs_of(kind).get("attention_mask", torch.ones(ROWS, TOKENS)).bool()
        for of_rank in results:
            found, values, ids, _ = of_rank[number]
            torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)
            top = every.topk(TOP).values[is_token]
            torch.testing.assert_close(values[is_token].double(), top, atol=1e-5, rtol=1e-5)
            of_ids = every.gather(-1, ids)[is_token]
            torch.testing.assert_close(of_ids, top, atol=1e-5, rtol=1e-5)
            assert all(torch.equal(found, theirs[number][0]) for theirs in results)
        if results[0][number][-1] is not None:
            distance, what = worst_gradient([theirs[number][-1] for theirs in results], gradients)
            assert distance < 1e-5, what


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_token_before_it_is_zero(kind):
    model, batch = model_in(MODELS["gpt2"], context()), inputs_of(kind)
    assert torch.equal(model.token_logprobs(**batch) == 0, first_ones(batch))


def test_they_are_those_of_transformers(tmp_path):
    hf = gpt2()
    hf.save_pretrained(tmp_path)
    batch = inputs_of("plain")
    batch["attention_mask"] = (torch.arange(TOKENS) < torch.tensor([[13], [5], [1], [9]])).long()
    with torch.no_grad():
        exact, _ = from_logits(hf(**batch).logits, batch)
    found = megazoo.from_pretrained(tmp_path, context()).token_logprobs(**batch)
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)


class LikelihoodHead(LanguageModelHead):
    """Has a loss of log-probabilities, as preferences have."""

    def loss(self, x, batch, factor=None, **_):
        found, *_ = self.log_probabilities(x, batch)
        return -found.sum()


class LikelihoodFamily(Llama):
    def add_head(self):
        super().add_head(LikelihoodHead)


def trained_by(family, layout: Layout, count: int):
    ctx = context(**sizes_of(layout))
    model = randomize(family.build(MODELS["llama"], ctx, seed=3))
    batch = rows_of_replica(batch_of(2, "documents, padding"), ctx)
    with short_pieces():
        loss = model.train_batch(
            **batch, num_microbatches=count // ctx.dp_size, schedule=layout.schedule
        )
    return loss.item(), parts_of_gradients(model)


@pytest.mark.parametrize(
    "layout",
    marked_slow(
        ["tp1", "cp2+ulysses", "pp2+zb-h1", "tp2+sp", "cp2", "dp2", "pp2v2", "pp2v2+zb-v"],
        lambda number, _: number > 2,
    ),
)
def test_a_loss_of_them_trains_in_every_layout(ranks, layout):
    place = Layout.named(layout)
    count = micro_batches(place)
    loss, gradients = trained_by(Llama, Layout(), count)
    results = ranks(trained_by, place.ranks, LikelihoodFamily, place, count)
    assert all(found == pytest.approx(loss, rel=1e-5) for found, _ in results)
    distance, name = worst_gradient([parts for _, parts in results], gradients)
    assert distance < 1e-5, name


class Doubled(LanguageModelHead):
    """Has logits of its own, which no piece has."""

    def outputs(self, x, batch):
        return 2 * super().outputs(x, batch)


class DoubledFamily(GPT2):
    def add_head(self):
        super().add_head(Doubled)


def of_own_logits(layout: dict):
    model = randomize(DoubledFamily.build(MODELS["gpt2"], context(**layout), seed=3))
    batch = inputs_of("padding")
    with mock.patch.object(VocabParallelHead, "log_probabilities_in_pieces") as pieces:
        found, values, _ = model.token_logprobs(**batch, top_k=TOP)
    assert not pieces.called
    (found * WEIGHTS).sum().backward()
    model.sync_gradients()
    exact, every = from_logits(model(**batch, return_logits=True).logits, batch)
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values.double(), every.topk(TOP).values, atol=1e-5, rtol=1e-5)
    return parts_of_gradients(model)


@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=str)
def test_a_head_with_logits_of_its_own_has_theirs(ranks, layout):
    model, batch = (
        randomize(DoubledFamily.build(MODELS["gpt2"], context(), seed=3)),
        inputs_of("padding"),
    )
    found, _ = from_logits(model(**batch).logits, batch)
    (found * WEIGHTS).sum().backward()
    results = run_in_layout(ranks, of_own_logits, layout)
    distance, name = worst_gradient(results, parts_of_gradients(model))
    assert distance < 1e-5, name


def test_16_bits():
    """As accurate as whole logits in 16 bits."""
    batch = inputs_of("plain")
    model = model_in(MODELS["llama"], context(), dtype=torch.bfloat16)
    exact, _ = from_logits(model(**batch).logits, batch)
    (exact * WEIGHTS).sum().backward()
    whole = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    with short_pieces():
        found = model.token_logprobs(**batch)
        (found * WEIGHTS).sum().backward()
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient.dtype == whole[name].dtype
        assert (gradient - whole[name]).abs().max() <= 2e-2 * whole[name].abs().max(), name


MISTAKES = {
    "top_k 0 must be 1 or more": dict(top_k=0),
    "top_k 62 must be below 62": dict(top_k=62),
    "needs input_ids on every rank": dict(input_ids=None),
    "attention_mask has the shape": dict(attention_mask=torch.ones(ROWS, 2)),
    "not a mask that is added": dict(attention_mask=torch.full((ROWS, TOKENS), -1e9)),
}


@pytest.mark.parametrize("error", MISTAKES)
def test_mistakes_are_told(error):
    model = megazoo.from_config(MODELS["gpt2"], context())
    with pytest.raises(UserError, match=error):
        model.token_logprobs(**{**inputs_of("plain"), **MISTAKES[error]})


def test_classifiers_have_none():
    model = megazoo.from_config(replace(MODELS["gpt2"], num_labels=2), context())
    with pytest.raises(UserError, match="a classifier has no log-probabilities"):
        model.token_logprobs(**inputs_of("plain"))
