"""One result in every layout: losses, gradient norms, every gradient and the weights, what is
generated and the scores, against one process."""

import random
from dataclasses import replace
from functools import cache
from itertools import product
from unittest import mock

import pytest
import torch

import megazoo
from megazoo.errors import UserError
from megazoo.evaluation.scoring import evaluate_texts, score, score_choices
from megazoo.testing import Layout
from megazoo.tokenizer import ByteTokenizer
from tests.support import layouts, training
from tests.support.context_parallel import KINDS, batch_of, rows_of_replica
from tests.support.generation import PAD, prompts
from tests.support.layouts import (
    LAYOUTS,
    MODELS,
    case_name,
    check_training,
    in_layout,
    model_in,
    possible,
)
from tests.support.sampling import marked_slow
from tests.support.training import (
    CLIP,
    context,
    layout_name,
    make_batch,
    randomize,
    tiny_config,
    train,
    world,
    worst_relative,
)

NO_EMBEDDING, HEAD_ALONE = r"^(?!embedding)", r"^head"
# In the first layer no query, key or value has a gradient; in the second they have, and no weight.
KEYS_WITHOUT_GRADIENT = r"layers\.0\.(?!attention\.qkv)|^norm|^head"
HOW = {
    "plain": {},
    "selective": {"recompute": ("selective",)},
    "full": {"recompute": ("full",)},
    "full, every 2": {"recompute": ("full", 2)},
    "offload": {"offload": True},
    "embedding frozen": {"train": NO_EMBEDDING},
}


ALL_KINDS = (*KINDS, "documents, padding", "positions")


def in_turns(values, draw: random.Random, count: int) -> list:
    """So many of the values, each as often as the others, in an order that is drawn."""
    values, turns = list(values), []
    while len(turns) < count:
        turns += draw.sample(values, len(values))
    return turns[:count]


def drawn_cases() -> list[tuple[str, str, str, str]]:
    """A case for each layout and each model that goes into it; the first ones of the layouts have
    all models, kinds of batches and ways to train in turn. The others of a layout have all kinds
    and all ways in turn."""
    draw, cases = random.Random(3), []
    turns = [in_turns(values, draw, len(LAYOUTS)) for values in (MODELS, KINDS, HOW)]
    for layout, model, kind, how in zip(LAYOUTS, *turns, strict=True):
        fits = [name for name in MODELS if possible(layout, name)]
        first = model if model in fits else draw.choice(fits)
        cases.append((layout, first, kind, how))
        others = [name for name in fits if name != first]
        own = random.Random(layout)
        kinds, ways = (in_turns(values, own, len(others)) for values in (ALL_KINDS, HOW))
        cases += zip([layout] * len(others), others, kinds, ways, strict=True)
    return cases


# `make test` runs the first case of each of these layouts: together they have all models, kinds of
# batches, ways to train, and each axis alone and beside another.
FAST = {
    "tp2", "tp2+sp", "tp4+sp", "pp2", "pp2+zb-h1", "pp2v2", "dp2", "tp2pp2", "tp2dp2+sp+zero",
    "pp2dp2+zero", "cp2", "cp3", "tp2cp2", "cp2pp2v2", "cp2pp2+zb-h1", "cp2dp2", "cp2+zero",
    "cp2+ulysses", "cp2pp2+ulysses", "cp2+ulysses+zero", "pp2v2+zb-v",
}  # fmt: skip


def is_slow(number: int, case: tuple) -> bool:
    return case[0] not in FAST or any(earlier[0] == case[0] for earlier in DRAWN[:number])


DRAWN = drawn_cases()


@pytest.mark.parametrize(
    ("layout", "model", "kind", "how"), marked_slow(DRAWN, is_slow, name="-".join)
)
def test_training_equals_one_process(ranks, layout, model, kind, how):
    check_training(ranks, layout, model, kind, HOW[how])


EVERYTHING = "documents, padding"
SPECIAL = {  # what only some layouts and models have, or what was wrong once
    "zero, documents": ("cp2dp2+zero", "mpt", "documents", {}),
    "zero, offload": ("cp2+zero", "gpt2", "plain", {"offload": True}),
    "offload, tp": ("tp2cp2", "llama", "padding", {"offload": True}),
    "selective": ("tp2cp2+sp", "mpt", EVERYTHING, HOW["selective"]),
    "full, ulysses": ("cp2+ulysses", "gpt2", "padding", HOW["full, every 2"]),
    "embedding frozen": ("cp2", "llama", "plain", HOW["embedding frozen"]),
    "head alone": ("cp2pp2", "gpt2, untied", "padding", {"train": HEAD_ALONE}),
    "keys without gradient": ("cp2", "llama, yarn", "plain", {"train": KEYS_WITHOUT_GRADIENT}),
    "keys without gradient, ulysses": (
        "cp2+ulysses", "gpt2, untied", "plain", {"train": KEYS_WITHOUT_GRADIENT},
    ),
    "untied over stages": ("cp2pp2+ulysses", "gpt2, untied", "documents", {}),
    "zero bubble": ("cp2pp2+zb-h1", "gpt2", EVERYTHING, {}),
    "norms over tp": ("tp2cp2", "mpt", "plain", {}),
    "norms over tp, ulysses": ("tp2cp2+ulysses", "mpt", EVERYTHING, {}),
    "copies of KV heads": ("tp4", "llama", EVERYTHING, {}),
    "copies of KV heads, sp": ("tp4+sp", "llama", "plain", {}),
    "copies of KV heads, with norms": ("tp4", "mpt", "plain", {}),
    "one KV head": ("cp4+ulysses", "llama, one KV head", "documents", {}),
    "one KV head, tp": ("tp2cp2+ulysses", "llama, one KV head", "plain", {}),
    "uneven heads": ("cp4+ulysses", "llama, 6 heads", "plain", {}),
    "uneven heads, cp 3": ("cp3+ulysses", "gpt2, 5 heads", "documents", {}),
    "uneven heads, tp": ("tp2cp2+sp+ulysses", "mpt, 5 heads", "odd", {}),
    "uneven heads, keys": ("tp2cp2+sp", "gpt2, 5 heads", "plain", {}),
    "accumulation": ("cp4", "llama", EVERYTHING, {"count": 4}),
    "positions": ("cp2", "llama", "positions, padding", {}),
    # the longest document has 9 tokens: the scaling is for those, not for 13
    "restarting positions": ("cp2pp2", "llama, dynamic", "documents, restarting", {}),
    "learned positions": ("cp2pp2", "mpt, learned positions", "positions", {}),
}  # fmt: skip


# Of which the drawn cases above have all but the meeting of just these settings.
MET_ABOVE = {
    "zero, documents", "offload, tp", "selective", "full, ulysses", "embedding frozen",
    "untied over stages", "zero bubble", "norms over tp, ulysses", "copies of KV heads, sp",
    "accumulation", "uneven heads",
}  # fmt: skip


@pytest.mark.parametrize("name", marked_slow(list(SPECIAL), lambda _, name: name in MET_ABOVE))
def test_training_equals_one_process_with(ranks, name):
    check_training(ranks, *SPECIAL[name])


WIDE = {"hidden_size": 40, "heads": 5, "kv_heads": 5, "ffn_size": 1283}  # ten times 128, and 3
UNEVEN = {  # inner features that tp does not divide
    "gpt2, tp 4": ("gpt2", {"ffn_size": 50}, "tp4", "plain"),
    "gpt2, by 128, tp 3": ("gpt2, 5 heads", {"ffn_size": 1283}, "tp3", "plain"),
    "gpt2, tp 2, pp 2": ("gpt2", {"ffn_size": 51}, "tp2pp2+sp", "selective"),
    "llama, tp 4": ("llama", {"ffn_size": 50}, "tp4+sp", "selective"),
    "llama, by 128, tp 3": ("llama", WIDE, "tp3", "plain"),
    "llama, by 128, tp 2": ("llama", WIDE, "tp2+sp", "full"),
    "mpt, tp 4": ("mpt", {"ffn_size": 50}, "tp4", "selective"),
    "mpt, by 128, tp 3": ("mpt", WIDE, "tp3+sp", "plain"),
}


@pytest.mark.parametrize("name", marked_slow(list(UNEVEN), lambda n, _: n in (2, 3, 5)))
def test_inner_features_need_not_divide(ranks, name):
    model, sizes, layout, how = UNEVEN[name]
    config = replace(MODELS[model], layers=2, **sizes)
    batches = layouts.batches_of("plain", 2)
    results = in_layout(ranks, layouts.trained, layout, config, batches, model=HOW[how])
    worst, what = layouts.worst_difference(results, layouts.trained(config, batches, {}))
    assert worst < 1e-5, what


# Interleaved and zero-bubble, with what they combine with; six micro-batches, which pp 4 does not
# divide, or four.
PIPELINES = [
    ("1f1b", 2, 2),
    ("1f1b", 2, 3),
    ("1f1b", 4, 2),
    ("1f1b", 4, 3),
    ("zb-h1", 2, 1),
    ("zb-h1", 4, 1),
]
BESIDE = [(dict(), 0), (dict(tp=2), 0), (dict(dp=2), 0), (dict(dp=2), 1), (dict(tp=2, sp=True), 0)]
PIPELINE_CASES = [
    (model, schedule, dict(pp=pp, v=virtual, **beside), mode, micro_batches, zero)
    for model, (schedule, pp, virtual), (beside, zero), mode, micro_batches in product(
        ("gpt2", "llama"), PIPELINES, BESIDE, [("none",), ("full",)], (4, 6)
    )
]


PIPELINES_FAST = [
    ("gpt2", "1f1b", dict(pp=2, v=2, tp=2, sp=True), ("none",), 4, 0),
    ("gpt2", "1f1b", dict(pp=2, v=3, dp=2), ("full",), 4, 1),
    ("llama", "zb-h1", dict(pp=2, v=1, tp=2), ("none",), 6, 0),
]


@cache
def one_process_of(config, rows: int, steps: int):
    return train(config, {}, steps, micro_batch=rows // 2, rows=rows)


def with_layers(model: str, layers: int):
    """GPT-2 tied, LLaMA not."""
    if model == "gpt2":
        return tiny_config(layers=layers)
    return replace(training.MODELS["llama"], layers=layers, tie_embeddings=False)


@pytest.mark.parametrize(
    ("model", "schedule", "layout", "mode", "micro_batches", "zero"),
    marked_slow(
        PIPELINE_CASES,
        lambda _, case: case not in PIPELINES_FAST,
        name=lambda case: " ".join(map(str, case)),
    ),
)
def test_pipelines_train_like_one_process(
    ranks, model, schedule, layout, mode, micro_batches, zero
):
    rows = micro_batches * layout.get("dp", 1)
    how = {"schedule": schedule, "recompute": mode, "micro_batch": 1, "rows": rows, "zero": zero}
    config = with_layers(model, max(4, layout["pp"] * layout["v"]))
    histories = ranks(train, world(layout), config, layout, 2, **how)
    assert all(history == histories[0] for history in histories), "ranks disagree"
    assert worst_relative(histories[0], one_process_of(config, rows, 2)) < 1e-5


def gradients_of_loss(config, direct, layout):
    """Gradients of one batch, by loss.backward() or by train_batch."""
    model = randomize(megazoo.from_config(config, context(**layout), seed=3))
    ids, _ = make_batch(0)
    if direct:
        model(ids, labels=ids).loss.backward()
    else:
        model.train_batch(ids, labels=ids)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("model", "layout"),
    marked_slow(
        list(product(["llama, one KV head", "mpt"], ["tp2", "tp2+sp", "tp4+sp"])),
        lambda number, _: number not in (2, 3, 4),
    ),
)
def test_backward_of_the_loss_gives_the_gradients_of_train_batch(ranks, model, layout):
    """Without train_batch, too, copies over tp get whole gradients."""
    direct = in_layout(ranks, gradients_of_loss, layout, MODELS[model], True)
    whole = in_layout(ranks, gradients_of_loss, layout, MODELS[model], False)
    for ours, expected in zip(direct, whole, strict=True):
        for name, gradient in ours.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-8, rtol=1e-5)


@cache
def one_process_of_gpt2(config, steps: int):
    return train(config, {}, steps, micro_batch=8)


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        pytest.param(dict(tp=2, pp=2), True, id="tp2pp2-tied"),
        pytest.param(dict(dp=2), False, id="dp2-untied"),
    ],
)
def test_losses_and_gradient_norms_equal_one_process(ranks, layout, tied):
    config = tiny_config(tied)
    expected = one_process_of_gpt2(config, 8)
    histories = ranks(train, world(layout), config, layout, 8)
    assert all(history == histories[0] for history in histories), "ranks disagree"
    assert worst_relative(histories[0], expected) < 1e-5
    assert all(norm > CLIP for _, norm in expected), "clipping was not active"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "layout",
    [
        dict(tp=2), dict(tp=4), dict(pp=2), dict(pp=4), dict(dp=2), dict(tp=2, pp=2),
        dict(tp=2, dp=2), dict(pp=2, dp=2), dict(tp=2, pp=2, dp=2), dict(tp=4, pp=2),
        dict(pp=4, dp=2), dict(tp=2, pp=4), dict(dp=8), dict(pp=5),
    ],
    ids=layout_name,
)  # fmt: skip
def test_every_layout_under_every_schedule(ranks, layout, tied, schedule):
    """The exhaustive sweep: 20 steps, one sequence a micro-batch, five heads over tp 2 (three and
    two), dp up to 8."""
    config = tiny_config(
        tied, **({"hidden_size": 40, "heads": 5} if layout.get("tp", 1) == 2 else {})
    )
    expected = one_process_of_gpt2(config, 20)
    histories = ranks(train, world(layout), config, layout, micro_batch=1, schedule=schedule)
    assert worst_relative(histories[0], expected) < 1e-5


SHALLOW = tiny_config(layers=2)  # tied


@pytest.fixture(scope="module")
def with_all(ranks):
    """The losses and norms of two ranks with all their all-reduces, for a layout's items; each
    trained once."""
    return cache(lambda layout: ranks(train, 2, SHALLOW, dict(layout), 3)[0])


def train_without(what, config, layout, steps=3):
    with without(what):
        return train(config, layout, steps)


def without(what):
    """Take one all-reduce out."""
    target, replacement = {
        "copy": ("megazoo.layers.matmul.enter_tensor_parallel", lambda x, ctx: x),
        "reduce": ("megazoo.layers.linear.leave_tensor_parallel", lambda x, ctx: x),
        "cross-entropy": (
            "megazoo.layers.fused_cross_entropy.all_reduce",
            lambda *_, **__: None,
        ),
        "copies over tp": ("megazoo.engine.gradients.sum_over_copies", lambda *_: None),
        "sequence's gather": (
            "megazoo.parallel.regions.all_gather_sequence",
            lambda x, group: torch.cat([x, x], dim=-2),
        ),
        "sequence's sum": (
            "megazoo.parallel.regions.reduce_scatter_sequence",
            lambda x, group: x.chunk(2, -2)[group.rank()].contiguous(),
        ),
        "tied gradient": ("megazoo.engine.gradients.sum_between_stages", lambda *_: None),
        "norm": ("megazoo.optim.clip.all_reduce_over", lambda *_: None),
        "data parallel": ("megazoo.parallel.buckets.all_reduce", lambda *_, **__: None),
        "loss and label count": ("megazoo.engine.pipeline.all_reduce", lambda *_: None),
    }[what]
    return mock.patch(target, replacement)


@pytest.mark.parametrize(
    ("what", "layout"),
    [
        ("copy", {"tp": 2}),
        ("reduce", {"tp": 2}),
        ("cross-entropy", {"tp": 2}),
        ("copies over tp", {"tp": 2, "sp": True}),
        ("sequence's gather", {"tp": 2, "sp": True}),
        ("sequence's sum", {"tp": 2, "sp": True}),
        ("tied gradient", {"pp": 2}),
        ("norm", {"tp": 2}),
        ("norm", {"pp": 2}),
        ("data parallel", {"dp": 2}),
        ("loss and label count", {"dp": 2}),
    ],
    ids=case_name,
)
def test_taking_out_an_all_reduce_is_noticed(ranks, with_all, what, layout):
    """The check above fails for each, in three steps: no all-reduce is there for nothing."""
    expected = one_process_of_gpt2(SHALLOW, 3)
    lacking = ranks(train_without, 2, what, SHALLOW, layout)
    assert worst_relative(with_all(tuple(layout.items())), expected) < 1e-5
    assert worst_relative(lacking[0], expected) > 1e-4


# Generation and scoring: a vocabulary of bytes.
TEXT = dict(layers=2, max_positions=64, vocab_size=300)
WRITERS = {name: replace(MODELS[name], **TEXT) for name in ("gpt2", "llama", "mpt")}
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


WRITTEN = list(product(WRITERS, LAYOUTS))  # a layout has another schedule or ZeRO-1: the same
WRITTEN_FAST = [
    ("gpt2", "cp2"), ("llama", "cp3+ulysses"), ("mpt", "cp2pp2"), ("mpt", "tp2pp2+sp"),
]  # fmt: skip


@cache
def written_by_one_process(name: str):
    return trained_around(WRITERS[name], {})


@pytest.mark.parametrize(
    ("name", "layout"),
    marked_slow(
        [case for case in WRITTEN if not {"zero", "zb-h1", "gpipe"} & set(case[1].split("+"))
         and Layout.named(case[1]).virtual_pp == 1 and not case[1].startswith("pp4")],
        lambda _, case: case not in WRITTEN_FAST,
    ),
)  # fmt: skip
def test_generation_and_scores_are_those_of_one_process(ranks, name, layout):
    """And leave the model as it was."""
    texts, (numbers, exact), losses = written_by_one_process(name)
    assert texts["streamed"] == [*texts["one row"][0][9:], "end"]
    for theirs, scores, their_losses in in_layout(ranks, trained_around, layout, WRITERS[name]):
        assert theirs == texts
        assert scores[0] == pytest.approx(numbers, rel=1e-5)
        assert scores[1] == exact
        assert their_losses == pytest.approx(losses, rel=1e-5)
