"""One result in every layout: losses, gradient norms and gradients against one process."""

from types import SimpleNamespace
from unittest import mock

import pytest
from helpers import CLIP, tiny_config, train, worst_relative

LAYOUTS = [
    dict(tp=2), dict(tp=4), dict(pp=2), dict(pp=4), dict(dp=2), dict(tp=2, pp=2), dict(tp=2, dp=2), dict(pp=2, dp=2),
    dict(tp=2, pp=2, dp=2),
]  # fmt: skip


def name(layout):
    return "".join(f"{axis}{size}" for axis, size in layout.items())


def world(layout):
    size = 1
    for factor in layout.values():
        size *= factor
    return size


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_losses_and_gradient_norms_equal_one_process(ranks, layout, tied):
    config = tiny_config(tied)
    expected = train(config, {}, micro_batch=8)
    histories = ranks(train, world(layout), config, layout)
    assert all(history == histories[0] for history in histories), "ranks disagree"
    assert worst_relative(histories[0], expected) < 1e-5
    assert all(norm > CLIP for _, norm in expected), "clipping was not active"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "layout", [*LAYOUTS, dict(tp=4, pp=2), dict(pp=4, dp=2), dict(tp=2, pp=4), dict(dp=8), dict(pp=5)], ids=name
)
def test_every_layout_under_every_schedule(ranks, layout, tied, schedule):
    """The exhaustive sweep: one sequence a micro-batch, five heads over tp 2 (three and two), dp up to 8."""
    config = tiny_config(tied, **({"hidden_size": 40, "heads": 5} if layout.get("tp", 1) == 2 else {}))
    expected = train(config, {}, micro_batch=8)
    histories = ranks(train, world(layout), config, layout, micro_batch=1, schedule=schedule)
    assert worst_relative(histories[0], expected) < 1e-5


def train_without(what, config, layout, steps=3):
    with without(what):
        return train(config, layout, steps)


def without(what):
    """Take one all-reduce out."""
    target, replacement = {
        "copy": ("megazoo.parallel.collectives.enter_tensor_parallel", lambda x, ctx: x),
        "reduce": ("megazoo.parallel.collectives.leave_tensor_parallel", lambda x, ctx: x),
        "cross-entropy": (
            "megazoo.layers.cross_entropy.collectives",
            SimpleNamespace(all_reduce=mock.Mock()),
        ),
        "tied gradient": ("megazoo.models.base.sum_between_stages", lambda *_: None),
        "norm": ("megazoo.optim.all_reduce", lambda *_: None),
        "data parallel": ("megazoo.parallel.data_parallel.all_reduce", lambda *_, **__: None),
        "loss and label count": ("megazoo.parallel.pipeline.all_reduce", lambda *_: None),
    }[what]
    return mock.patch(target, replacement)


@pytest.mark.parametrize(
    ("what", "layout"),
    [
        ("copy", {"tp": 2}),
        ("reduce", {"tp": 2}),
        ("cross-entropy", {"tp": 2}),
        ("tied gradient", {"pp": 2}),
        ("norm", {"tp": 2}),
        ("norm", {"pp": 2}),
        ("data parallel", {"dp": 2}),
        ("loss and label count", {"dp": 2}),
    ],
)
def test_taking_out_an_all_reduce_is_noticed(ranks, what, layout):
    """The check above fails for each, in three steps: no all-reduce is there for nothing."""
    config = tiny_config(tied=True)
    expected = train(config, {}, steps=3, micro_batch=8)
    with_all, lacking = ranks(train, 2, config, layout, 3), ranks(train_without, 2, what, config, layout)
    assert worst_relative(with_all[0], expected) < 1e-5
    assert worst_relative(lacking[0], expected) > 1e-4
