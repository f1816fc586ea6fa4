"""Pipeline schedules as pure tables: what each rank does, in what order. No processes needed.

A table is a rank's list of actions. `with_exchanges` adds the point-to-point traffic that the actions imply, and
`simulate` runs the tables of all ranks in one process under the strictest rules of a communication library.
"""

from typing import NamedTuple

from megazoo.errors import UserError


class Action(NamedTuple):
    """Forward ("F") or backward ("B") of one micro-batch through one stage. Stage s lives on rank s % pp."""

    kind: str
    stage: int
    microbatch: int


class Transfer(NamedTuple):
    """What `consumer` needs from another rank: the activations of a forward or the gradient of a backward."""

    consumer: Action
    source: int
    target: int


class Exchange(NamedTuple):
    """Sends and receives that a rank starts together, so that neighbours who swap tensors can't block each other."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


def forward_only(rank: int, pp: int, microbatches: int) -> list[Action]:
    """Evaluation: every micro-batch forward, in order."""
    return [Action("F", rank, m) for m in range(microbatches)]


def gpipe(rank: int, pp: int, microbatches: int) -> list[Action]:
    """All forwards, then all backwards: simple, and all micro-batches in flight at once (Huang et al. 2019)."""
    return forward_only(rank, pp, microbatches) + [Action("B", rank, m) for m in range(microbatches)]


def one_f_one_b(rank: int, pp: int, microbatches: int) -> list[Action]:
    """1F1B: after a warm-up, one forward and one backward in turn; min(pp - rank, microbatches) in flight.

    The bubble is that of gpipe, (pp - 1) / microbatches (PipeDream-Flush, Narayanan et al. 2021).
    """
    warm_up = min(pp - rank - 1, microbatches)
    table = [Action("F", rank, m) for m in range(warm_up)]
    for m in range(microbatches - warm_up):
        table += [Action("F", rank, warm_up + m), Action("B", rank, m)]
    return table + [Action("B", rank, m) for m in range(microbatches - warm_up, microbatches)]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


def with_exchanges(table: list[Action], pp: int, stages: int) -> list[Action | Exchange]:
    """A rank's table with its traffic: after each action its result leaves together with the next one's arrival."""

    def arriving(action: Action) -> Transfer | None:
        source = action.stage - 1 if action.kind == "F" else action.stage + 1
        return Transfer(action, source % pp, action.stage % pp) if 0 <= source < stages else None

    def leaving(action: Action) -> Transfer | None:
        target = action.stage + 1 if action.kind == "F" else action.stage - 1
        consumer = Action(action.kind, target, action.microbatch)
        return Transfer(consumer, action.stage % pp, target % pp) if 0 <= target < stages else None

    steps: list[Action | Exchange] = []
    for before, action in zip([None, *table], [*table, None], strict=True):
        sends = (leaving(before),) if before and leaving(before) else ()
        receives = (arriving(action),) if action and arriving(action) else ()
        if sends or receives:
            steps.append(Exchange(sends, receives))
        if action:
            steps.append(action)
    return steps


class Simulation(NamedTuple):
    """makespan: time from the first action to the last. peaks: each rank's most micro-batches in flight at once."""

    makespan: float
    peaks: list[int]


def simulate(programs: list[list[Action | Exchange]], cost: dict[str, float] | None = None) -> Simulation:
    """Run every rank's program in simulated time; raise UserError on a deadlock.

    Exchanges follow the strictest rules that a library may have: a rank's exchanges happen in order, a tensor moves
    only when both sides have reached its exchange, and a rank starts the next exchange only when all of the one
    before has moved. An action waits for what it receives. Transfers take no time. cost: time of "F" and "B".
    """
    cost = cost or {"F": 1.0, "B": 2.0}
    ranks = range(len(programs))
    position, clock = [0 for _ in ranks], [0.0 for _ in ranks]
    in_flight, peaks = [0 for _ in ranks], [0 for _ in ranks]
    posted: dict[tuple[Transfer, int], float] = {}  # (transfer, rank) -> when that side reached it
    open_exchange: list[Exchange | None] = [None for _ in ranks]

    def moved(transfers) -> bool:
        return all((t, t.source) in posted and (t, t.target) in posted for t in transfers)

    def step(rank: int) -> bool:
        item, last = programs[rank][position[rank]], open_exchange[rank]
        if isinstance(item, Exchange):
            if last and not moved(last.sends + last.receives):
                return False
            posted.update({(transfer, rank): clock[rank] for transfer in item.sends + item.receives})
            open_exchange[rank] = item
        else:
            arriving = [t for t in last.receives if t.consumer == item] if last else []
            if not moved(arriving):
                return False
            start = max([clock[rank], *(posted[t, side] for t in arriving for side in (t.source, t.target))])
            clock[rank] = start + cost[item.kind]
            in_flight[rank] += {"F": 1, "B": -1}[item.kind]
            peaks[rank] = max(peaks[rank], in_flight[rank])
        position[rank] += 1
        return True

    while unfinished := [rank for rank in ranks if position[rank] < len(programs[rank])]:
        if not sum(step(rank) for rank in unfinished):  # each rank that can go on goes one step
            stuck = "; ".join(f"rank {rank} at {programs[rank][position[rank]]}" for rank in unfinished)
            raise UserError(f"the schedule deadlocks: {stuck}")
    return Simulation(max(clock), peaks)
