"""One result in every layout: losses, gradient norms and gradients against one process."""

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
