"""One result in every layout: losses, gradient norms and gradients against one process."""

import random
from dataclasses import replace
from functools import cache
from itertools import product
from unittest import mock

import pytest
import torch

import megazoo
from tests.support.layouts import STEPS, case_name, one_process
from tests.support.training import (
    CLIP,
    MODELS,
    context,
    layout_name,
    make_batch,
    randomize,
    tiny_config,
    train,
    train_and_keep_gradients,
    world,
    worst_gradient,
    worst_relative,
)

LAYOUTS = [
    dict(tp=2),
    dict(tp=4),
    dict(pp=2),
    dict(pp=4),
    dict(dp=2),
    dict(tp=2, pp=2),
    dict(tp=2, dp=2),
    dict(pp=2, dp=2),
    dict(tp=2, pp=2, dp=2),
]
SEQUENCE_PARALLEL = [
    dict(**layout, sp=True)
    for layout in (
        dict(tp=2),
        dict(tp=4),
        dict(tp=2, pp=2),
        dict(tp=2, dp=2),
        dict(tp=2, pp=2, dp=2),
    )
]
MODES = [("none",), ("selective",), ("full",), ("full", 2)]
ALL_CASES = [
    (m, layout, mode) for layout in LAYOUTS + SEQUENCE_PARALLEL for m in MODELS for mode in MODES
]


def sample(each: int) -> list:
    """Some cases of every layout."""
    draw = random.Random(3)
    return [
        case
        for layout in LAYOUTS + SEQUENCE_PARALLEL
        for case in draw.sample([case for case in ALL_CASES if case[1] == layout], each)
    ]


def check_training(ranks, config, layout, mode):
    history, gradients = one_process(config)
    results = ranks(train_and_keep_gradients, world(layout), config, layout, STEPS, recompute=mode)
    assert all(theirs == results[0][0] for theirs, _ in results), "ranks disagree"
    assert worst_relative(results[0][0], history) < 1e-5
    for step, expected in enumerate(gradients):
        distance, name = worst_gradient([ours[step] for _, ours in results], expected)
        assert distance < 1e-5, f"{name} at step {step + 1}"


@pytest.mark.parametrize(("model", "layout", "mode"), sample(1), ids=case_name)
def test_every_gradient_equals_one_process(ranks, model, layout, mode):
    check_training(ranks, MODELS[model], layout, mode)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "mode"), ALL_CASES, ids=case_name)
def test_every_gradient_equals_one_process_in_all_cases(ranks, model, layout, mode):
    check_training(ranks, MODELS[model], layout, mode)


WIDE = {"hidden_size": 40, "heads": 5, "kv_heads": 5, "ffn_size": 1283}  # ten times 128, and 3
UNEVEN = {  # inner features that tp does not divide
    "gpt2, tp 4": (tiny_config(ffn_size=50), dict(tp=4), ("none",)),
    "gpt2, by 128, tp 3": (
        tiny_config(hidden_size=40, heads=5, ffn_size=1283),
        dict(tp=3),
        ("none",),
    ),
    "gpt2, tp 2, pp 2": (tiny_config(ffn_size=51), dict(tp=2, pp=2, sp=True), ("selective",)),
    "llama, tp 4": (replace(MODELS["llama"], ffn_size=50), dict(tp=4, sp=True), ("selective",)),
    "llama, by 128, tp 3": (replace(MODELS["llama"], **WIDE), dict(tp=3), ("none",)),
    "llama, by 128, tp 2": (replace(MODELS["llama"], **WIDE), dict(tp=2, sp=True), ("full",)),
    "mpt, tp 4": (replace(MODELS["mpt"], ffn_size=50), dict(tp=4), ("selective",)),
    "mpt, by 128, tp 3": (replace(MODELS["mpt"], **WIDE), dict(tp=3, sp=True), ("none",)),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_inner_features_need_not_divide(ranks, name):
    check_training(ranks, *UNEVEN[name])


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
        ("gpt2", "llama"), PIPELINES, BESIDE, MODES[:1] + MODES[2:3], (4, 6)
    )
]


@cache
def one_process_of_many_layers(model: str, rows: int):
    return train(DEEP[model], {}, STEPS, micro_batch=rows // 2, rows=rows)


# As many layers as there are stages at pp 4 with three a rank; GPT-2 tied, LLaMA not.
DEEP = {
    "gpt2": tiny_config(layers=12),
    "llama": replace(MODELS["llama"], layers=12, tie_embeddings=False),
}


def check_pipeline(ranks, model, schedule, layout, mode, micro_batches, zero):
    rows = micro_batches * layout.get("dp", 1)
    how = {"schedule": schedule, "recompute": mode, "micro_batch": 1, "rows": rows, "zero": zero}
    histories = ranks(train, world(layout), DEEP[model], layout, STEPS, **how)
    assert all(history == histories[0] for history in histories), "ranks disagree"
    assert worst_relative(histories[0], one_process_of_many_layers(model, rows)) < 1e-5


@pytest.mark.parametrize("case", random.Random(1).sample(PIPELINE_CASES, 12), ids=case_name)
def test_pipelines_train_like_one_process(ranks, case):
    check_pipeline(ranks, *case)


@pytest.mark.slow
@pytest.mark.parametrize("case", PIPELINE_CASES, ids=case_name)
def test_all_pipelines_train_like_one_process(ranks, case):
    check_pipeline(ranks, *case)


def gradients_of_loss(config, layout, direct):
    """Gradients of one batch, by loss.backward() or by train_batch."""
    model = randomize(megazoo.from_config(config, context(**layout), seed=3))
    ids, _ = make_batch(0)
    if direct:
        model(ids, labels=ids).loss.backward()
    else:
        model.train_batch(ids, labels=ids)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "layout", [dict(tp=2), dict(tp=2, sp=True), dict(tp=4, sp=True)], ids=layout_name
)
@pytest.mark.parametrize("model", ["llama, one KV head", "mpt"])
def test_backward_of_the_loss_gives_the_gradients_of_train_batch(ranks, model, layout):
    """Without train_batch, too, copies over tp get whole gradients."""
    direct = ranks(gradients_of_loss, world(layout), MODELS[model], layout, True)
    whole = ranks(gradients_of_loss, world(layout), MODELS[model], layout, False)
    for ours, expected in zip(direct, whole, strict=True):
        for name, gradient in ours.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-8, rtol=1e-5)


@cache
def one_process_of_gpt2(config, steps: int):
    return train(config, {}, steps, micro_batch=8)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
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
    [*LAYOUTS, dict(tp=4, pp=2), dict(pp=4, dp=2), dict(tp=2, pp=4), dict(dp=8), dict(pp=5)],
    ids=layout_name,
)
def test_every_layout_under_every_schedule(ranks, layout, tied, schedule):
    """The exhaustive sweep: 20 steps, one sequence a micro-batch, five heads over tp 2 (three and
    two), dp up to 8."""
    config = tiny_config(
        tied, **({"hidden_size": 40, "heads": 5} if layout.get("tp", 1) == 2 else {})
    )
    expected = one_process_of_gpt2(config, 20)
    histories = ranks(train, world(layout), config, layout, micro_batch=1, schedule=schedule)
    assert worst_relative(histories[0], expected) < 1e-5


@pytest.fixture(scope="module")
def with_all(ranks):
    """The losses and norms of two ranks with all their all-reduces, for a layout's items; each
    trained once."""
    return cache(lambda layout: ranks(train, 2, tiny_config(tied=True), dict(layout), 3)[0])


def train_without(what, config, layout, steps=3):
    with without(what):
        return train(config, layout, steps)


def without(what):
    """Take one all-reduce out."""
    target, replacement = {
        "copy": ("megazoo.layers.linear.enter_tensor_parallel", lambda x, ctx: x),
        "reduce": ("megazoo.layers.linear.leave_tensor_parallel", lambda x, ctx: x),
        "cross-entropy": (
            "megazoo.layers.fused_cross_entropy.all_reduce",
            lambda *_, **__: None,
        ),
        "copies over tp": ("megazoo.engine.step.sum_over_copies", lambda *_: None),
        "sequence's gather": (
            "megazoo.parallel.regions.all_gather_sequence",
            lambda x, group: torch.cat([x, x], dim=-2),
        ),
        "sequence's sum": (
            "megazoo.parallel.regions.reduce_scatter_sequence",
            lambda x, group: x.chunk(2, -2)[group.rank()].contiguous(),
        ),
        "tied gradient": ("megazoo.engine.step.sum_between_stages", lambda *_: None),
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
)
def test_taking_out_an_all_reduce_is_noticed(ranks, with_all, what, layout):
    """The check above fails for each, in three steps: no all-reduce is there for nothing."""
    config = tiny_config(tied=True)
    expected = one_process_of_gpt2(config, 3)
    lacking = ranks(train_without, 2, what, config, layout)
    assert worst_relative(with_all(tuple(layout.items())), expected) < 1e-5
    assert worst_relative(lacking[0], expected) > 1e-4
