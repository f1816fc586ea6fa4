"""Schedules as pure tables: order, deadlocks, memory and time, without a process."""

import pytest

from megazoo.errors import UserError
from megazoo.parallel.schedule import (
    SCHEDULES,
    Action,
    Exchange,
    forward_only,
    gpipe,
    one_f_one_b,
    simulate,
    with_exchanges,
)


def programs(schedule, pp, microbatches):
    return [with_exchanges(schedule(rank, pp, microbatches), pp, pp) for rank in range(pp)]


ALL_SIZES = [(pp, m) for pp in range(1, 9) for m in range(1, 33)]


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_every_microbatch_goes_forward_then_backward_once(schedule):
    for pp, m in ALL_SIZES:
        for rank in range(pp):
            table = schedule(rank, pp, m)
            assert sorted(table) == sorted(Action(kind, rank, i) for kind in "FB" for i in range(m))
            assert all(table.index(Action("F", rank, i)) < table.index(Action("B", rank, i)) for i in range(m))


@pytest.mark.parametrize("schedule", [forward_only, gpipe, one_f_one_b])
def test_no_deadlock_under_strict_rendezvous(schedule):
    for pp, m in ALL_SIZES:
        simulate(programs(schedule, pp, m))


def test_1f1b_keeps_min_of_stages_left_and_microbatches_in_flight():
    for pp, m in ALL_SIZES:
        assert simulate(programs(one_f_one_b, pp, m)).peaks == [min(pp - rank, m) for rank in range(pp)]


def test_gpipe_keeps_all_microbatches_in_flight():
    assert simulate(programs(gpipe, 4, 8)).peaks == [8] * 4


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_bubble_is_that_of_the_theory(schedule):
    for pp, m in ALL_SIZES:  # (pp - 1) forwards and backwards of idle time beside m of work
        assert simulate(programs(schedule, pp, m), {"F": 1, "B": 2}).makespan == 3 * (m + pp - 1)


def test_the_simulator_finds_a_deadlock():
    # Rank 0 wants the gradient of micro-batch 1 first, rank 1 sends that of micro-batch 0 first.
    tables = [
        [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 1), Action("B", 0, 0)],
        [Action("F", 1, 0), Action("B", 1, 0), Action("F", 1, 1), Action("B", 1, 1)],
    ]
    with pytest.raises(UserError, match="deadlocks: rank 0 at"):
        simulate([with_exchanges(table, 2, 2) for table in tables])


def test_steady_state_sends_and_receives_in_one_exchange():
    exchanges = [item for item in programs(one_f_one_b, 4, 8)[1] if isinstance(item, Exchange)]
    fused = [e for e in exchanges if e.sends and e.receives]
    assert len(fused) > 0.7 * len(exchanges)
