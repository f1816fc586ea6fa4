"""Schedules as pure tables: order, deadlocks, memory and time, without a process."""

from itertools import pairwise

import pytest

from megazoo.errors import UserError
from megazoo.parallel.cpu.shared_memory import Mailboxes
from megazoo.parallel.schedule import (
    COST,
    SCHEDULES,
    Action,
    Exchange,
    Transfer,
    check_schedule,
    forward_only,
    gpipe,
    in_flight,
    one_f_one_b,
    program,
    splits_backward,
    timeline,
    zb_h1,
)

SIZES = [(pp, m) for pp in range(1, 8) for m in [*range(1, 20), 33]]
PLAIN = [(schedule, 1) for schedule in (forward_only, gpipe, one_f_one_b, zb_h1)]
INTERLEAVED = [
    (schedule, virtual) for schedule in (forward_only, gpipe, one_f_one_b) for virtual in (2, 3, 4)
]


def name(part) -> str:
    return getattr(part, "__name__", str(part))


def sizes(virtual):
    return [(pp, m) for pp, m in SIZES if virtual == 1 or pp > 1]


def tables_of(schedule, pp, virtual, m):
    return [schedule(rank, pp, virtual, m) for rank in range(pp)]


def makespan(schedule, pp, virtual, m, cost=None):
    return max(span.end for span in timeline(tables_of(schedule, pp, virtual, m), cost).values())


def run_strictly(programs, cost=COST) -> float:
    """Run every rank's program in simulated time, under the strictest rules that a communication
    library may have.

    A rank's exchanges happen in order, a tensor moves only when both sides have reached its
    exchange, and a rank starts the next exchange only when all of the one before has moved. An
    action waits for what it needs. Returns the time.
    """
    ranks = range(len(programs))
    position, clock, opened = [0 for _ in ranks], [0.0 for _ in ranks], [None for _ in ranks]
    coming = [{} for _ in ranks]  # what each rank has started to receive, by what consumes it
    posted = {}  # (transfer, rank) -> when that side reached it

    def moved(transfers):
        return all((t, side) in posted for t in transfers for side in (t.source, t.target))

    def step(rank):
        item, last = programs[rank][position[rank]], opened[rank]
        if isinstance(item, Exchange):
            if last and not moved(last.sends + last.receives):
                return False
            posted.update({(t, rank): clock[rank] for t in item.sends + item.receives})
            coming[rank].update({t.consumer: t for t in item.receives})
            opened[rank] = item
        else:
            transfer = coming[rank].get(item)
            assert transfer or not needs_transfer(item, programs), (
                f"{item} has not asked for its input"
            )
            if transfer and not moved([transfer]):
                return False
            sides = (
                [posted[transfer, side] for side in (transfer.source, transfer.target)]
                if transfer
                else []
            )
            clock[rank] = max([clock[rank], *sides]) + cost[item.kind]
        position[rank] += 1
        return True

    while unfinished := [rank for rank in ranks if position[rank] < len(programs[rank])]:
        if not sum(step(rank) for rank in unfinished):
            raise AssertionError(
                f"deadlock: {[programs[rank][position[rank]] for rank in unfinished]}"
            )
    return max(clock)


def run_in_slots(programs, slots: int) -> bool:
    """Whether all programs come to their end where a tensor goes into the next of its sender's
    slots for its receiver, which must be empty: what was there has been taken by the action that it
    was for.

    When each moves is no matter: nobody can take what another waits for.
    """
    position, ways, sent, taken = [0] * len(programs), {}, set(), set()

    def step(rank):
        item = programs[rank][position[rank]]
        if isinstance(item, Action) and needs_transfer(item, programs) and item not in sent:
            return False
        for transfer in item.sends if isinstance(item, Exchange) else ():
            way = ways.setdefault((rank, transfer.target), [])
            if transfer.consumer not in sent:
                if len(way) >= slots and way[-slots] not in taken:
                    return False
                way.append(transfer.consumer)
                sent.add(transfer.consumer)
        taken.add(item)
        position[rank] += 1
        return True

    while unfinished := [
        rank for rank, items in enumerate(programs) if position[rank] < len(items)
    ]:
        if not sum(step(rank) for rank in unfinished):
            return False
    return True


def needs_transfer(action, programs) -> bool:
    last = max(item.stage for item in programs[-1] if isinstance(item, Action))
    return action.stage > 0 if action.kind == "F" else action.kind in "BI" and action.stage < last


@pytest.mark.parametrize(("schedule", "virtual"), PLAIN + INTERLEAVED, ids=name)
def test_every_microbatch_goes_through_every_stage_once_in_order(schedule, virtual):
    kinds = {forward_only: "F", gpipe: "FB", one_f_one_b: "FB", zb_h1: "FIW"}[schedule]
    for pp, m in sizes(virtual):
        for rank, table in enumerate(tables_of(schedule, pp, virtual, m)):
            stages = range(rank, pp * virtual, pp)
            assert sorted(table) == sorted(
                Action(kind, s, i) for kind in kinds for s in stages for i in range(m)
            )
            place = {action: number for number, action in enumerate(table)}
            for s in stages:
                for kind, following in pairwise(kinds):
                    assert all(
                        place[Action(kind, s, i)] < place[Action(following, s, i)] for i in range(m)
                    )
                for kind in kinds:  # gradients are then added up in the same order everywhere
                    assert [a.microbatch for a in table if a.kind == kind and a.stage == s] == list(
                        range(m)
                    )


@pytest.mark.parametrize(("schedule", "virtual"), PLAIN + INTERLEAVED, ids=name)
def test_no_deadlock_and_no_time_lost_under_the_strictest_rules(schedule, virtual):
    for pp, m in sizes(virtual):
        programs = [program(schedule, rank, pp, virtual, m) for rank in range(pp)]
        assert run_strictly(programs) == makespan(schedule, pp, virtual, m)
        if m < 8:
            # whatever the actions take
            run_strictly(programs, {"F": 3.0, "B": 1.0, "I": 5.0, "W": 0.1})


@pytest.mark.parametrize(("schedule", "virtual"), PLAIN + INTERLEAVED, ids=name)
def test_no_deadlock_in_the_slots_of_shared_memory(schedule, virtual):
    for pp in range(2, 9):
        for m in (1, 2, 3, pp + 1, 2 * pp - 1, 2 * pp, 3 * pp - 1):
            programs = [program(schedule, rank, pp, virtual, m) for rank in range(pp)]
            assert run_in_slots(programs, Mailboxes.slots_each(pp))


@pytest.mark.parametrize("pp", [2, 6, 12])
def test_the_slots_that_uneven_groups_need_grow_with_the_ranks(pp):
    programs = [program(one_f_one_b, rank, pp, 2, 3 * pp - 1) for rank in range(pp)]
    assert run_in_slots(programs, Mailboxes.slots_each(pp))
    assert not run_in_slots(programs, Mailboxes.slots_each(pp) - 1)


def test_both_sides_of_every_transfer_have_it():
    programs = [program(one_f_one_b, rank, 4, 2, 6) for rank in range(4)]
    exchanges = [
        (rank, item)
        for rank, items in enumerate(programs)
        for item in items
        if isinstance(item, Exchange)
    ]
    sends = sorted(t for rank, item in exchanges for t in item.sends if t.source == rank)
    receives = sorted(t for rank, item in exchanges for t in item.receives if t.target == rank)
    assert sends == receives
    assert len(sends) == 2 * 6 * 7
    assert Transfer(Action("F", 4, 0), 3, 0) in sends


def test_bubbles_are_those_of_the_theory():
    """Idle time over work: F = 1 and B = 2, or F = I = W = 1."""
    for pp, m in SIZES:
        for schedule in (gpipe, one_f_one_b):
            assert makespan(schedule, pp, 1, m) == 3 * (m + pp - 1)  # (pp - 1) / m
        if m >= pp > 1:
            assert makespan(zb_h1, pp, 1, m) == 3 * m + (pp - 1)  # a third
            for virtual in (2, 3, 4):
                # (pp - 1) / (virtual m)
                assert makespan(one_f_one_b, pp, virtual, m) == 3 * (m * virtual + pp - 1)


def test_memory_is_bounded():
    for pp, m in SIZES:
        assert [in_flight(table) for table in tables_of(one_f_one_b, pp, 1, m)] == [
            min(pp - r, m) for r in range(pp)
        ]
        assert [in_flight(table) for table in tables_of(zb_h1, pp, 1, m)] == [min(pp, m)] * pp
        assert [in_flight(table) for table in tables_of(gpipe, pp, 1, m)] == [m] * pp
        if m % pp == 0 and pp > 1:
            for virtual in (2, 3):
                expected = [
                    min(2 * (pp - r - 1) + (virtual - 1) * pp + 1, m * virtual) for r in range(pp)
                ]
                assert [
                    in_flight(table) for table in tables_of(one_f_one_b, pp, virtual, m)
                ] == expected


def test_a_table_that_waits_for_itself_is_refused():
    # Rank 0 wants the gradient of micro-batch 1 before it has sent micro-batch 0, which rank 1
    # wants first.
    tables = [
        [Action("F", 0, 1), Action("B", 0, 1), Action("F", 0, 0), Action("B", 0, 0)],
        [Action("F", 1, 0), Action("B", 1, 0), Action("F", 1, 1), Action("B", 1, 1)],
    ]
    with pytest.raises(UserError, match="deadlocks: rank 0 at"):
        timeline(tables)


def test_weights_before_the_gradient_that_they_need_are_refused():
    table = [Action("F", 0, 0), Action("W", 0, 0), Action("I", 0, 0)]
    with pytest.raises(UserError, match="deadlocks: rank 0 at W stage 0"):
        timeline([table])


def test_zb_h1_has_one_stage_a_rank():
    with pytest.raises(UserError, match="one stage a rank: use virtual-pp 1"):
        zb_h1(0, 2, 2, 4)


def test_steady_state_sends_and_receives_in_one_exchange():
    exchanges = [item for item in program(one_f_one_b, 1, 4, 1, 8) if isinstance(item, Exchange)]
    fused = [e for e in exchanges if e.sends and e.receives]
    assert len(fused) >= 0.3 * len(exchanges), exchanges


@pytest.mark.parametrize("split", [lambda action: action.microbatch, lambda action: action.stage])
def test_a_schedule_that_splits_some_backwards_is_refused(monkeypatch, split):
    """The weights' gradients of a whole backward would wait for a W that never comes."""

    def some(rank, pp, virtual, microbatches):
        table = []
        for action in gpipe(rank, pp, virtual, microbatches):
            halves = action.kind == "B" and split(action)
            table += [action._replace(kind=kind) for kind in ("IW" if halves else action.kind)]
        return table

    monkeypatch.setitem(SCHEDULES, "some", some)
    for ask in (check_schedule, splits_backward):
        with pytest.raises(UserError, match="schedule some has B beside I and W: split every"):
            ask("some", 2, 1)
