"""Pipeline schedules as pure tables: what each rank does, in what order. No processes needed.

A schedule is a function (rank, pp, virtual, microbatches) -> table: the list of a rank's actions.
SCHEDULES has it by its name, and `placed` names its placement. Everything else
follows from its tables: `timeline` says when each action would run, and `program` orders the
point-to-point traffic by that, the same on both its sides; whether backward is in two parts, and
how much memory is held, can be asked below.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from megazoo.errors import UserError
from megazoo.parallel.placement import Placement

# The time of each kind of action, by default.
COST: dict[Any, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


class Action(NamedTuple):
    """What a rank does with one micro-batch in one stage; which rank has a stage says the
    placement: see placement.py.

    kind: "F" forward; "B" backward; or backward in two parts: "I", of the inputs, and "W", of the
    weights.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} stage {self.stage} micro-batch {self.microbatch}"


Schedule = Callable[[int, int, int, int], list[Action]]


def placed(placement: str) -> Callable[[Schedule], Schedule]:
    """Mark a schedule, `@placed("v")`, as one whose stages lie so: see placement.py. Without a mark
    they lie in a "loop"."""

    def mark(schedule: Any) -> Schedule:
        schedule.placement = placement
        return schedule

    return mark


def placement_of(schedule: Schedule, pp: int, virtual: int) -> Placement:
    """Return where the stages of a schedule lie. UserError if it can't have so many a rank."""
    return Placement(getattr(schedule, "placement", "loop"), pp, virtual)


# The schedules. virtual: the stages of a rank.


def forward_only(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    """Evaluation: every micro-batch forward, in groups of at least pp, each group through all of
    the rank's stages."""
    return _in_groups("F", Placement("loop", pp, virtual).stages_of(rank), pp, microbatches)


@placed("v")
def forward_only_v(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    """Evaluation in a V: forwards of a rank's first stage until the first micro-batch has come back
    to its second, then of both in turn."""
    down, up = placement_of(forward_only_v, pp, virtual).stages_of(rank)
    table = [Action("F", down, microbatch) for microbatch in range(microbatches)]
    warm_up = up - down
    for microbatch in range(microbatches):
        table.insert(warm_up + 2 * microbatch, Action("F", up, microbatch))
    return table


# What evaluates where the stages of a model lie so.
FORWARD_ONLY: dict[str, Schedule] = {"loop": forward_only, "v": forward_only_v}


def gpipe(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    """All forwards, then all backwards: simple, and all micro-batches in flight at once (Huang et
    al. 2019)."""
    forwards = forward_only(rank, pp, virtual, microbatches)
    return forwards + _backwards(rank, pp, virtual, microbatches)


def one_f_one_b(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    """1F1B: after a warm-up, one forward and one backward in turn; min(pp - rank, microbatches) in
    flight.

    The bubble is that of gpipe, (pp - 1) / microbatches (PipeDream-Flush). With several stages a
    rank it is the interleaved schedule, whose bubble is as many times smaller, for as many times
    the traffic (Narayanan et al. 2021).
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
    """1F1B with backward in two parts: a rank's weights wait until their time would be idle, `rank`
    micro-batches long.

    The bubble is a third of 1F1B's where F, I and W take equally long, in the memory of 1F1B's
    first stage (ZB-H1: Qi et al. 2023).
    """
    if virtual > 1:
        raise UserError("schedule zb-h1 has one stage a rank: use virtual-pp 1, or schedule 1f1b")
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


# By the names that flags and train_batch take. An --import file adds its own.
SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1}


def _groups(microbatches: int, pp: int) -> list[range]:
    """The micro-batches in groups of equal size, nearly, of at least pp: fewer would leave ranks
    waiting."""
    count = max(1, microbatches // pp)
    cuts = [microbatches * number // count for number in range(count + 1)]
    return [range(*ends) for ends in pairwise(cuts)]


def _in_groups(kind: str, stages: Sequence[int], pp: int, microbatches: int) -> list[Action]:
    """Every micro-batch through these stages of a rank, a group after the other."""
    return [
        Action(kind, stage, microbatch)
        for group in _groups(microbatches, pp)
        for stage in stages
        for microbatch in group
    ]


def _backwards(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    stages = Placement("loop", pp, virtual).stages_of(rank)[::-1]
    return _in_groups("B", stages, pp, microbatches)


# Questions to a schedule.


def schedule_named(name: str) -> Schedule:
    """Return the schedule of that name; UserError if there is none."""
    if name not in SCHEDULES:
        raise UserError(f"unknown schedule {name!r}: there are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def placement_named_by(schedule: str) -> str:
    """Return the placement that the schedule of that name has; UserError if there is none."""
    return getattr(schedule_named(schedule), "placement", "loop")


def tables_of(schedule: Schedule, pp: int, virtual: int, microbatches: int) -> list[list[Action]]:
    """Return the tables of all ranks. UserError if the schedule can't have such stages, or gives a
    rank a stage of another."""
    placement = placement_of(schedule, pp, virtual)
    tables = [schedule(rank, pp, virtual, microbatches) for rank in range(pp)]
    for rank, table in enumerate(tables):
        for stage in sorted({action.stage for action in table} - {*placement.stages_of(rank)}):
            raise UserError(
                f"schedule {schedule.__name__} gives rank {rank} stage {stage}, which placement "
                f'{placement.name} does not: name another, as @placed("v") does'
            )
    return tables


def check_schedule(name: str, pp: int, virtual: int) -> None:
    """Raise UserError if no schedule has that name, or it can't have so many stages a rank, or it
    has backwards in two parts beside whole ones."""
    kinds = _kinds(schedule_named(name), pp, virtual)
    if {"B", "I"} <= kinds:
        raise UserError(f"schedule {name} has B beside I and W: split every backward, or none")


def splits_backward(name: str, pp: int, virtual: int = 1) -> bool:
    """Say whether a schedule has I and W in place of B. UserError as from `check_schedule`."""
    check_schedule(name, pp, virtual)
    return "I" in _kinds(schedule_named(name), pp, virtual)


@lru_cache(maxsize=256)
def _kinds(schedule: Schedule, pp: int, virtual: int) -> frozenset[str]:
    """Return the kinds of actions that any rank has."""
    tables = tables_of(schedule, pp, virtual, microbatches=pp)
    return frozenset(action.kind for table in tables for action in table)


def backward_follows(table: Sequence["Action | Exchange"], stage: int) -> bool:
    """Say whether each forward of a stage is followed by its whole backward, before anything else
    is computed."""
    actions = [item for item in table if isinstance(item, Action)]
    pairs = zip(actions, [*actions[1:], None], strict=True)
    return all(b == a._replace(kind="B") for a, b in pairs if a.kind == "F" and a.stage == stage)


def in_flight(table: Sequence[Action]) -> int:
    """Count the most micro-batches of a rank's stages whose activations are held at once: from F
    until B, or W."""
    held = peak = 0
    for action in table:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        peak = max(peak, held)
    return peak


# When its actions run.


class Span(NamedTuple):
    """When an action begins and ends."""

    start: float
    end: float


def timeline(
    tables: Sequence[Sequence[Action]], cost: dict[Any, float] | None = None, transfer: float = 0.0
) -> dict[Action, Span]:
    """Return when every action of all ranks' tables runs, if each rank does its own in order, as
    soon as what they need is there.

    cost: the time of each kind of action, or of each (kind, stage); by default a backward takes two
    forwards. transfer: the time that what a stage makes takes to the next, while both go on, if
    that is another rank's.
    Raises UserError if the tables wait for each other.
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


def source_of(action: Action, last: int) -> Action | None:
    """Return the action of another stage that makes an action's input, or None if none does.

    last: the last stage.
    """
    if action.kind == "F":
        return action._replace(stage=action.stage - 1) if action.stage else None
    if action.kind == "W" or action.stage == last:
        return None
    return action._replace(stage=action.stage + 1)


# What travels.


class Transfer(NamedTuple):
    """What `consumer` needs from another rank: the activations of a forward or the gradient of a
    backward. source, target: pipeline ranks."""

    consumer: Action
    source: int
    target: int


class Exchange(NamedTuple):
    """What a rank starts at one point of its program: a single transfer, which it either sends or
    receives.

    There is one transfer in each because NCCL makes one work of all that is started together:
    whoever waited for one tensor would wait for all of them.
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


@lru_cache(maxsize=256)
def program(
    schedule: Schedule, rank: int, pp: int, virtual: int, microbatches: int
) -> tuple[Action | Exchange, ...]:
    """Return a rank's table with its traffic.

    Each rank starts its transfers in the order of `transfers_in_order`: even where a library moves
    a rank's tensors one after the other, and a send blocks until its receive, none can wait for one
    that waits for it. A send starts when the timeline comes to its place in that order. A receive
    starts, and takes memory, when the action that makes its tensor does: before, nothing can come.
    """
    spans, transfers = transfers_in_order(schedule, pp, virtual, microbatches)
    table = schedule(rank, pp, virtual, microbatches)
    ends = [spans[action].end for action in table]
    slots: list[list[Exchange]] = [[] for _ in range(len(table) + 1)]
    slot = 0  # how many actions come before
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
    """Return the timeline, and the transfers of all ranks in the one order in which each starts its
    own, each with its place in the timeline and the action that makes its tensor.

    The place is the middle of the time between when its tensor is made and when it is
    needed: one that is not needed soon then holds up none that is, also where actions take longer
    or shorter than in the timeline. Of those at the same place every other pair of stages goes
    first, so that a late rank holds up its neighbours and not, one behind the other, all ranks.
    What a rank's stage makes for another stage of the rank does not travel.
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
