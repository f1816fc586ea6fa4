"""Schedules with placement v: two stages per rank, the first rank has the first and the last stage.

Their times count in units of a forward, a backward of the inputs or a backward of the weights of
one stage. A stage is half as large as in a schedule with one stage per rank.
"""

import itertools
from collections.abc import Iterator
from functools import lru_cache

from megazoo.parallel.actions import HELD, Action, in_flight, placed, placement_of, source_of


class Writer:
    """Writes the table of a rank: each action of a kind and stage is for its next micro-batch.

    microbatches: actions of later micro-batches are omitted.
    """

    def __init__(self, microbatches: int):
        self.microbatches = microbatches
        self.table: list[Action] = []
        self.next: dict[tuple[str, int], Iterator[int]] = {}

    def __call__(self, kinds: str, stage: int) -> None:
        """Append actions, e.g. "IW": a backward of the inputs, then one of the weights."""
        for kind in kinds:
            microbatch = next(self.next.setdefault((kind, stage), itertools.count()))
            if microbatch < self.microbatches:
                self.table.append(Action(kind, stage, microbatch))


@placed("v")
def zb_v(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    """Return the table of ZB-V: no idle time between the first and last action of a rank if F, I
    and W take the same time and there are at least 2 pp - 1 micro-batches.

    Every rank needs the memory of the first rank of 1F1B (Qi et al. 2023, section 6).
    """
    down, up = placement_of(zb_v, pp, virtual).stages_of(rank)
    add = Writer(microbatches)
    for _ in range(2 * (pp - rank) - 1):
        add("F", down)
    for _ in range(rank):
        add("F", up)
        add("F", down)
    for _ in range(pp - rank):
        add("FIW", up)
    count = max(microbatches, 2 * pp - 1)
    for number in range(pp, count):
        if number < count - (pp - rank - 1):
            add("F", down)
        add("IW", down)
        add("FIW", up)
    for _ in range(rank):
        add("I", down)
        add("I", up)
    for _ in range(pp - rank):
        add("IW", down)
    for stage in (up, down):
        for _ in range(rank):
            add("W", stage)
    return add.table


@placed("v")
def dualpipe_v(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    """Return the table of DualPipeV: pairs of a forward of one of the rank's stages and a backward
    of the other, so that the communication of one overlaps with the computation of the other.

    Backwards in pairs are not split, so their weight gradients follow directly. If F, I and W take
    the same time, the bubble is pp - 1 units with at least 2 pp micro-batches (DeepSeek-AI 2025).
    """
    down, up = placement_of(dualpipe_v, pp, virtual).stages_of(rank)
    add, delayed = Writer(microbatches), []
    after = pp - rank - 1  # the number of ranks after this one
    for _ in range(2 * after):
        add("F", down)
    for _ in range(rank + 1):
        add("F", down)
        add("F", up)
    for _ in range(after):
        add("IWF", up)
    for _ in range(max(microbatches, 2 * pp) - 2 * pp + rank + 1):
        add("F", down)
        add("IW", up)
        add("F", up)
        add("IW", down)
    for _ in range(after):
        add("IW", up)
        add("F", up)
        add("IW", down)
    # The second half of the last backwards is split. Their weight gradients fill the idle time.
    for number in range(2 * (rank + 1)):
        stage = (up, down)[number % 2]
        if number < rank + 1:
            add("IW", stage)
        else:
            add("I", stage)
            delayed.append(stage)
    for _ in range(after):
        add("W", delayed.pop(0))
        add("I", down)
        delayed.append(down)
    for stage in delayed:
        add("W", stage)
    return add.table


@placed("v")
def v_half(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    """Return the table of V-Half: half of the activation memory and half of the bubble of 1F1B, if
    F, I and W take the same time (Qi et al. 2024)."""
    gap = 0 if pp % 2 else 3  # without it, two actions of a rank would have the same time
    starts = tuple(
        (2 * r, 3 * pp - r - 2, 3 * pp + gap + 2 * r - 1, 6 * pp + gap - r - 2) for r in range(pp)
    )
    return _from_pattern(starts, microbatches, weights_last=True)[rank]


@placed("v")
def v_min(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    """Return the table of V-Min: a third of the activation memory and two thirds of the bubble of
    1F1B, if F, I and W take the same time (Qi et al. 2024)."""
    gap = 0 if pp % 3 else 2  # without it, two actions of a rank would have the same time
    starts = tuple((r, 2 * pp - r - 1, 2 * pp + gap + r, 4 * pp + gap - r - 1) for r in range(pp))
    return _from_pattern(starts, microbatches, weights_last=False)[rank]


Times = tuple[int, int, int, int]
PERIOD = 6  # the time of all actions of a micro-batch on a rank: F, I and W of two stages


@lru_cache(maxsize=64)
def _from_pattern(
    starts: tuple[Times, ...], microbatches: int, weights_last: bool
) -> list[list[Action]]:
    """Return the tables of all ranks from a pattern that repeats for each micro-batch.

    The actions then move to earlier times at which their ranks would be idle. An F only moves if
    the peak memory of the pattern is not exceeded.

    Args:
        starts: per rank, the times of the first micro-batch: F of its first stage, F of its second
            stage, I of its second stage, I of its first stage. Those of the next one are PERIOD
            later. W follows I in the next free unit.
        microbatches: their number.
        weights_last: whether a W only runs if no other action is ready.
    """
    left = [_timetable(rank, times, len(starts), microbatches) for rank, times in enumerate(starts)]
    limit, last = max(map(in_flight, left)), 2 * len(starts) - 1
    tables: list[list[Action]] = [[] for _ in starts]
    held, done = [0] * len(starts), set()
    while any(left):
        chosen = []
        for rank, actions in enumerate(left):
            if ready := _ready(actions, done, last, held[rank], limit):
                weights = {place for place in ready if actions[place].kind == "W"}
                first = min({*ready} - weights or weights) if weights_last else min(ready)
                chosen.append((rank, actions.pop(first)))
        for rank, action in chosen:
            tables[rank].append(action)
            held[rank] += HELD[action.kind]
            done.add(action)
    return tables


def _timetable(rank: int, times: Times, pp: int, microbatches: int) -> list[Action]:
    """Return the actions of a rank in the order of the pattern. times: those of the rank's first
    micro-batch."""
    down, up = rank, 2 * pp - 1 - rank
    kinds = ("F", down), ("F", up), ("I", up), ("I", down)
    timed = {
        start + PERIOD * microbatch: Action(*kind, microbatch)
        for kind, start in zip(kinds, times, strict=True)
        for microbatch in range(microbatches)
    }
    table, waiting = [], []
    for time in range(max(timed) + 1):
        if time in timed:
            table.append(timed[time])
            if timed[time].kind == "I":
                waiting.append(timed[time]._replace(kind="W"))
        elif waiting:
            table.append(waiting.pop(0))
    return table + waiting


def _ready(actions: list[Action], done: set[Action], last: int, held: int, limit: int) -> list[int]:
    """Return the places of the actions that a rank can run next, in order.

    Args:
        actions: the remaining actions of the rank, in order.
        done: the completed actions of all ranks.
        last: the last stage.
        held: the number of activations in the rank's memory.
        limit: the largest number of activations in memory, also after an F moved.
    """
    places, seen, peak = [], set(), held
    for place, action in enumerate(actions):
        if action[:2] not in seen:  # the later ones of this kind and stage wait for it
            seen.add(action[:2])
            before = action._replace(kind="I" if action.kind == "W" else "F")
            inputs = {source_of(action, last), before} - {None, action}
            if inputs <= done and (action.kind != "F" or place == 0 or peak < limit):
                places.append(place)
            if len(seen) == PERIOD:
                break
        held += HELD[action.kind]
        peak = max(peak, held)
    return places
