"""Pipeline schedules as tables: the actions of each rank, in order. They need no processes.

A schedule is a function (rank, pp, virtual, microbatches) -> table, the list of a rank's actions.
SCHEDULES is a dictionary of them, and `placed` sets their placement. The rest is derived from the
tables: `timeline` computes when each action runs, `program` orders the point-to-point communication
in the same way on both sides, and other functions return whether backward is split, and how much
memory is needed.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from megazoo.errors import UserError
from megazoo.parallel.actions import Action, Schedule, placed, placement_of, source_of
from megazoo.parallel.actions import in_flight as in_flight
from megazoo.parallel.placement import Placement
from megazoo.parallel.v_schedules import dualpipe_v, v_half, v_min, zb_v

# The default time of each kind of action.
COST: dict[Any, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


# The schedules. virtual: number of stages per rank.


def forward_only(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    """Return the table of an evaluation: every micro-batch forward, in groups of at least pp, each
    group through all stages of the rank."""
    return _in_groups("F", Placement("loop", pp, virtual).stages_of(rank), pp, microbatches)


@placed("v")
def forward_only_v(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    """Return the table of an evaluation with placement v: forwards of a rank's first stage until
    the first micro-batch reaches its second stage, then of both alternately."""
    down, up = placement_of(forward_only_v, pp, virtual).stages_of(rank)
    table = [Action("F", down, microbatch) for microbatch in range(microbatches)]
    warm_up = up - down
    for microbatch in range(microbatches):
        table.insert(warm_up + 2 * microbatch, Action("F", up, microbatch))
    return table


# The evaluation schedule for each placement.
FORWARD_ONLY: dict[str, Schedule] = {"loop": forward_only, "v": forward_only_v}


def gpipe(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    """Return the table of GPipe: all forwards, then all backwards, with all micro-batches in flight
    (Huang et al. 2019)."""
    forwards = forward_only(rank, pp, virtual, microbatches)
    return forwards + _backwards(rank, pp, virtual, microbatches)


def one_f_one_b(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    """Return the table of 1F1B: after a warm-up, one forward and one backward alternately, with
    min(pp - rank, microbatches) in flight.

    The bubble is the same as in gpipe, (pp - 1) / microbatches (PipeDream-Flush). With several
    stages per rank it is the interleaved schedule: the bubble is divided by their number, and the
    communication is multiplied by it (Narayanan et al. 2021).
    """
    forwards = forward_only(rank, pp, virtual, microbatches)
    backwards = _backwards(rank, pp, virtual, microbatches)
    warm_up = pp - rank - 1
    if virtual > 1:
        warm_up = 2 * warm_up + (virtual - 1) * max(map(len, _groups(microbatches, pp)))
    table = forwards[:warm_up]
    for pair in zip(forwards[warm_up:], backwards, strict=False):
        table += pair
    return table + backwards[max(0, len(forwards) - warm_up) :]


def zb_h1(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    """Return the table of ZB-H1: 1F1B with a split backward, where rank r delays weight gradients
    by r micro-batches into idle time.

    The bubble is a third of that of 1F1B if F, I and W take the same time. Every rank needs the
    memory of the first stage of 1F1B (Qi et al. 2023).
    """
    if virtual > 1:
        raise UserError(
            "schedule zb-h1 supports one stage per rank: use virtual-pp 1, or schedule 1f1b"
        )
    table, waiting = [], 0
    for action in one_f_one_b(rank, pp, 1, microbatches):
        if action.kind == "F":
            table.append(action)
            continue
        table.append(action._replace(kind="I"))
        waiting += 1
        if waiting > rank:
            table.append(Action("W", rank, action.microbatch - rank))
            waiting -= 1
    return table + [Action("W", rank, m) for m in range(microbatches - waiting, microbatches)]


# By the names in flags and train_batch. An --import file can add schedules.
SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
}


def _groups(microbatches: int, pp: int) -> list[range]:
    """Return the micro-batches in groups of nearly equal size, at least pp: fewer would leave ranks
    idle."""
    count = max(1, microbatches // pp)
    cuts = [microbatches * number // count for number in range(count + 1)]
    return [range(*ends) for ends in pairwise(cuts)]


def _in_groups(kind: str, stages: Sequence[int], pp: int, microbatches: int) -> list[Action]:
    """Return the actions of every micro-batch in these stages of a rank, group by group."""
    return [
        Action(kind, stage, microbatch)
        for group in _groups(microbatches, pp)
        for stage in stages
        for microbatch in group
    ]


def _backwards(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    stages = Placement("loop", pp, virtual).stages_of(rank)[::-1]
    return _in_groups("B", stages, pp, microbatches)


# Properties of a schedule.


def schedule_named(name: str) -> Schedule:
    """Return the schedule with this name; UserError if it does not exist."""
    if name not in SCHEDULES:
        raise UserError(f"unknown schedule {name!r}: use one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def placement_named_by(schedule: str) -> str:
    """Return the placement of the schedule with this name; UserError if it does not exist."""
    return getattr(schedule_named(schedule), "placement", "loop")


def tables_of(schedule: Schedule, pp: int, virtual: int, microbatches: int) -> list[list[Action]]:
    """Return the tables of all ranks. UserError if the schedule does not support these stages, or
    gives a rank a stage of another rank."""
    placement = placement_of(schedule, pp, virtual)
    tables = [schedule(rank, pp, virtual, microbatches) for rank in range(pp)]
    for rank, table in enumerate(tables):
        for stage in sorted({action.stage for action in table} - {*placement.stages_of(rank)}):
            raise UserError(
                f"schedule {schedule.__name__} assigns stage {stage} to rank {rank}, but its "
                f"placement {placement.name} does not: declare the right placement, for example "
                'with @placed("v")'
            )
    return tables


def check_schedule(name: str, pp: int, virtual: int) -> None:
    """Raise UserError if no schedule has this name, it does not support this number of stages per
    rank, or it mixes full and split backwards."""
    kinds = _kinds(schedule_named(name), pp, virtual)
    if {"B", "I"} <= kinds:
        raise UserError(f"schedule {name} mixes B with I and W: split every backward, or none")


def splits_backward(name: str, pp: int, virtual: int = 1) -> bool:
    """Return whether a schedule has I and W instead of B. UserError as in `check_schedule`."""
    check_schedule(name, pp, virtual)
    return "I" in _kinds(schedule_named(name), pp, virtual)


@lru_cache(maxsize=256)
def _kinds(schedule: Schedule, pp: int, virtual: int) -> frozenset[str]:
    """Return the kinds of actions of all ranks."""
    tables = tables_of(schedule, pp, virtual, microbatches=pp)
    return frozenset(action.kind for table in tables for action in table)


def backward_follows(table: Sequence["Action | Exchange"], stage: int) -> bool:
    """Return whether each forward of a stage is directly followed by its full backward."""
    actions = [item for item in table if isinstance(item, Action)]
    pairs = zip(actions, [*actions[1:], None], strict=True)
    return all(b == a._replace(kind="B") for a, b in pairs if a.kind == "F" and a.stage == stage)


# When its actions run.


class Span(NamedTuple):
    """The start and end of an action."""

    start: float
    end: float


def timeline(
    tables: Sequence[Sequence[Action]], cost: dict[Any, float] | None = None, transfer: float = 0.0
) -> dict[Action, Span]:
    """Return when every action of all ranks' tables runs, if each rank runs its actions in order,
    as soon as their inputs are available.

    cost: the time of each kind of action, or of each (kind, stage); by default a backward takes
    twice as long as a forward. transfer: the time to send an output to another rank; both ranks
    continue meanwhile. UserError if the tables deadlock.
    """
    cost, spans = cost or COST, {}
    position, clock = [0] * len(tables), [0.0] * len(tables)
    stages = [{action.stage for action in table} for table in tables]
    last = max(map(max, stages))
    unfinished = True
    while unfinished:
        unfinished = progress = False
        for rank, table in enumerate(tables):
            while position[rank] < len(table):
                action = table[position[rank]]
                needed = source_of(action, last)
                if action.kind == "W":
                    needed = action._replace(kind="I")  # on this rank, before
                if needed and needed not in spans:
                    unfinished = True
                    break
                under_way = transfer if needed and needed.stage not in stages[rank] else 0.0
                start = max(clock[rank], spans[needed].end + under_way if needed else 0.0)
                clock[rank] = start + cost[action.kind if action.kind in cost else action[:2]]
                spans[action] = Span(start, clock[rank])
                position[rank] += 1
                progress = True
        if unfinished and not progress:
            stuck = "; ".join(
                f"rank {r} at {t[p]}"
                for r, (t, p) in enumerate(zip(tables, position, strict=True))
                if p < len(t)
            )
            raise UserError(f"the schedule deadlocks: {stuck}")
    return spans


# Communication.


class Transfer(NamedTuple):
    """The input of `consumer` from another rank: activations of a forward or the gradient of a
    backward. source, target: pipeline ranks."""

    consumer: Action
    source: int
    target: int


class Exchange(NamedTuple):
    """A transfer that a rank starts at one point of its program, either a send or a receive.

    Each has a single transfer, because NCCL makes one work of all transfers that are started
    together, and waiting for one tensor would wait for all of them.
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


@lru_cache(maxsize=256)
def program(
    schedule: Schedule, rank: int, pp: int, virtual: int, microbatches: int
) -> tuple[Action | Exchange, ...]:
    """Return a rank's table with its communication.

    Each rank starts its transfers in the order of `transfers_in_order`. So there is no deadlock
    even if a library moves a rank's tensors one after the other, and a send blocks until its
    receive. A send starts at its place in the timeline. A receive starts, and allocates memory,
    when the action that computes its tensor starts: it can't arrive earlier.
    """
    spans, transfers = transfers_in_order(schedule, pp, virtual, microbatches)
    table = schedule(rank, pp, virtual, microbatches)
    ends = [spans[action].end for action in table]
    slots: list[list[Exchange]] = [[] for _ in range(len(table) + 1)]
    slot = 0  # number of actions before
    for place, source, transfer in transfers:
        if rank == transfer.source:
            slot = max(slot, bisect_right(ends, place))
            slots[slot].append(Exchange(sends=(transfer,), receives=()))
        elif rank == transfer.target:
            slot = max(slot, bisect_right(ends, spans[source].start))
            slots[slot].append(Exchange(sends=(), receives=(transfer,)))
    steps: list[Action | Exchange] = []
    for exchanges, action in zip(slots, table, strict=False):
        steps += [*exchanges, action]
    return (*steps, *slots[-1])


@lru_cache(maxsize=8)
def transfers_in_order(
    schedule: Schedule, pp: int, virtual: int, microbatches: int
) -> tuple[dict[Action, Span], list[tuple[float, Action, Transfer]]]:
    """Return the timeline, and the transfers of all ranks in the order in which they are started,
    each with its place in the timeline and the action that computes its tensor.

    The place is the middle between the time when its tensor is computed and the time when it is
    needed. So a transfer that is needed late does not delay an urgent one, even if actions take
    longer or shorter than in the timeline. Of those at the same place, every second pair of stages
    is first, so that a late rank delays its neighbours, and not all ranks one after the other.
    Transfers between stages of the same rank are not listed.
    """
    spans = timeline(tables_of(schedule, pp, virtual, microbatches))
    placement, order = placement_of(schedule, pp, virtual), []
    for consumer, span in spans.items():
        source = source_of(consumer, placement.count - 1)
        if source is None:
            continue
        transfer = Transfer(consumer, *map(placement.rank_of, (source.stage, consumer.stage)))
        if transfer.source != transfer.target:
            place = (spans[source].end + span.start) / 2
            pair = min(source.stage, consumer.stage)
            order.append((place, pair % 2, transfer, source))
    return spans, [(place, source, transfer) for place, _, transfer, source in sorted(order)]
