"""A V-shaped schedule of a user's own file trains as one process does."""

import pytest

from megazoo.errors import UserError
from megazoo.parallel.schedule import SCHEDULES
from tests.support.training import (
    layout_name,
    tiny_config,
    train_and_keep_gradients,
    worst_gradient,
    worst_relative,
)

V = dict(pp=2, v=2, placement="v")


def train_in_v(layout, schedule="v-gpipe"):
    import tests.support.v_schedule  # noqa: F401

    try:
        how = {"schedule": schedule} if layout else {}
        return train_and_keep_gradients(tiny_config(), layout, steps=3, micro_batch=2, **how)
    finally:
        SCHEDULES.pop("v-gpipe", None)
        import sys

        sys.modules.pop("tests.support.v_schedule", None)


@pytest.mark.parametrize("layout", [V, dict(tp=2, **V), dict(dp=2, **V)], ids=layout_name)
def test_it_trains_as_one_process_does(ranks, layout):
    losses, gradients = train_in_v({})
    found = ranks(train_in_v, layout.get("tp", 1) * 2 * layout.get("dp", 1), layout)
    for ours, _ in found:
        assert worst_relative(ours, losses) < 1e-5
    for step, expected in enumerate(gradients):
        worst, name = worst_gradient([each[step] for _, each in found], expected)
        assert worst < 1e-4, name


def refused(layout, schedule):
    with pytest.raises(UserError) as told:
        train_in_v(layout, schedule)
    return str(told.value)


def test_a_schedule_of_another_placement_is_refused(ranks):
    told = ranks(refused, 2, V, "1f1b")[0]
    assert "schedule 1f1b needs placement loop, and the model's context has v" in told
