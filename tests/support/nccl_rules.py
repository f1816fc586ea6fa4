"""The programs of a pipeline in simulated time, under the rules by which NCCL moves tensors.

A rank has two streams, one that computes and one that moves tensors, and each takes its items in
the order of the rank's program. An exchange begins when the computing stream has come to it and the
exchange before it has ended. A tensor moves, in no time, once the exchanges of both its sides have
begun; an exchange ends when all of its tensors have moved. An action waits for the whole exchange
that brings its input, and a rank waits for its sends, but for the newest few.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from megazoo.engine.transport import MAX_OPEN_EXCHANGES
from megazoo.parallel.schedule import Action, Exchange, source_of

Program = Sequence[Action | Exchange]
Cost = Callable[[Action], float]


def time_under_nccl(
    programs: Sequence[Program], cost: Cost, most_open: int = MAX_OPEN_EXCHANGES
) -> float:
    """Return when the last rank has finished its program; AssertionError if ranks wait for each
    other.

    cost: the time of an action. most_open: sends that may be under way behind the newest one.
    """
    ranks = range(len(programs))
    needs = [list(needs_of(program, most_open)) for program in programs]
    position, clock = [0 for _ in ranks], [0.0 for _ in ranks]  # of the computing streams
    queues = [deque() for _ in ranks]  # exchanges that have not ended, and when they were queued
    moved = [0.0 for _ in ranks]  # when the exchange before the queue's first one ended
    begun: dict = {}  # (transfer, rank) -> when that side's exchange began
    ended: dict[Exchange, float] = {}

    def compute(rank: int) -> bool:
        """Take the next item of the computing stream, if what it waits for has ended."""
        if position[rank] == len(programs[rank]):
            return False
        needed = needs[rank][position[rank]]
        if not all(exchange in ended for exchange in needed):
            return False
        item = programs[rank][position[rank]]
        clock[rank] = max([clock[rank], *(ended[exchange] for exchange in needed)])
        if isinstance(item, Exchange):
            queues[rank].append((item, clock[rank]))
        else:
            clock[rank] += cost(item)
        position[rank] += 1
        return True

    def move(rank: int) -> bool:
        """Begin the first exchange of the queue; end it if both sides of all its transfers have
        begun."""
        if not queues[rank]:
            return False
        exchange, queued = queues[rank][0]
        transfers = exchange.sends + exchange.receives
        if (transfers[0], rank) not in begun:
            began = max(queued, moved[rank])
            begun.update({(transfer, rank): began for transfer in transfers})
            return True
        sides = [(t, side) for t in transfers for side in (t.source, t.target)]
        if not all(side in begun for side in sides):
            return False
        ended[exchange] = moved[rank] = max(begun[side] for side in sides)
        queues[rank].popleft()
        return True

    while any(compute(rank) or move(rank) for rank in ranks):
        pass
    finished = [at == len(program) for program, at in zip(programs, position, strict=True)]
    assert all(finished), "ranks wait for each other"
    assert not any(queues), "ranks wait for each other in the end"
    return max(clock + moved)


def needs_of(program: Program, most_open: int) -> Iterable[list[Exchange]]:
    """Yield, for each item of a program, the exchanges that must have ended before the computing
    stream takes it."""
    brings = {t.consumer: item for item in program if is_exchange(item) for t in item.receives}
    sends: deque[Exchange] = deque()
    for item in program:
        needed = [brings[item]] if item in brings else []
        while len(sends) > most_open:
            needed.append(sends.popleft())
        yield needed
        if is_exchange(item) and item.sends:
            sends.append(item)


def is_exchange(item: Action | Exchange) -> bool:
    return isinstance(item, Exchange)


def time_of_tables(tables: Sequence[Sequence[Action]], cost: Cost) -> float:
    """Return when the last rank has finished its table, if every tensor is there as soon as it is
    made."""
    last = max(action.stage for table in tables for action in table)
    position, clock = [0 for _ in tables], [0.0 for _ in tables]
    ends: dict[Action, float] = {}

    def step(rank: int) -> bool:
        if position[rank] == len(tables[rank]):
            return False
        action = tables[rank][position[rank]]
        source = source_of(action, last)
        if source and source not in ends:
            return False
        ends[action] = clock[rank] = max(clock[rank], ends.get(source, 0.0)) + cost(action)
        position[rank] += 1
        return True

    while any(step(rank) for rank in range(len(tables))):
        pass
    return max(clock)


Collective = tuple[str, tuple[int, ...], int]  # its name, the ranks of its group, elements


def run_collectives(programs: Sequence[Sequence[Collective]]) -> None:
    """Let each rank issue its collectives in its order, each of which holds it until all ranks of
    the group have come to the same one. AssertionError if ranks wait for each other.

    That is stricter than NCCL, whose communicators hold each other up only if they want the same
    place on the device.
    """
    position = [0 for _ in programs]

    def newest(rank: int) -> Collective | None:
        at = position[rank]
        return programs[rank][at] if at < len(programs[rank]) else None

    def step(rank: int) -> bool:
        mine = newest(rank)
        if mine is None or any(newest(other) != mine for other in mine[1]):
            return False
        for other in mine[1]:
            position[other] += 1
        return True

    while any(step(rank) for rank in range(len(programs))):
        pass
    stuck = {rank: newest(rank) for rank in range(len(programs)) if newest(rank)}
    assert not stuck, f"ranks wait for each other: {stuck}"
