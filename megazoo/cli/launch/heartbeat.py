"""Telling which rank is absent while the others still wait for it.

A rank that waits for NCCL can't tell: its main thread hangs in CUDA until NCCL's watchdog ends the
process, without a name. So each rank has a thread that says in the job's store, every few seconds,
that it lives and which call it is in. A rank whose thread is silent has been stopped, or its
machine or network is gone. One whose thread speaks, and that has not entered the call in which the
others are, hangs somewhere else.
"""

import os
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from threading import Event, Thread

from megazoo.cli.launch.deaths import name_of
from megazoo.environment import local_rank
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import calls_made
from megazoo.terminal import print_error
from megazoo.torch_internals import store_of_a_thread

PERIOD = 5.0  # seconds between two beats, or a tenth of the groups' timeout
SILENCE = 30.0  # seconds without a beat after which a rank is named, or half of the timeout
OUT_OF_REACH = 5.0  # seconds that the end waits for a store that does not answer
LEFT = b"left"  # the last beat of a rank that left in order, or with an error that it tells


@contextmanager
def heartbeat(ctx: ParallelContext):
    """Name on stderr the ranks that are silent, or late for a call, within; all ranks enter it
    together.

    Rank 0 tells; where rank 0 itself is silent, the last rank does; of a store that does not
    answer, both and the first rank of each machine. A rank is late when others have entered a call
    half of the groups' timeout before, and it has entered none since.
    """
    if ctx.world_size == 1 or ctx.mesh is None:
        yield
        return
    heart = _Heart(ctx)
    try:
        yield
    finally:
        heart.close()


class _Heart:
    """The thread of one rank. It holds no context, so that none can end with it."""

    def __init__(self, ctx: ParallelContext):
        timeout = ctx.timeout.total_seconds()
        self.period, self.silence = min(PERIOD, timeout / 10), min(SILENCE, timeout / 2)
        self._store, self._beats = store_of_a_thread(), 0
        self._keys = [f"megazoo/{ctx.name}/beat/{rank}" for rank in range(ctx.world_size)]
        self._rank, self._closing, self._watch = ctx.rank, Event(), None
        self._beat()
        hosts = all_gather_objects(os.uname().nodename, ctx)  # after which each rank has one
        if ctx.rank in (0, ctx.world_size - 1):
            names = [f"{name_of(rank, ctx)} on {host}" for rank, host in enumerate(hosts)]
            self._watch = Watch(names, self.silence, timeout / 2)
        self._thread = self._start(self._run)

    def close(self) -> None:
        """End the thread, and say that this rank is no longer to be watched."""
        self._closing.set()
        self._thread.join()
        self._start(self._leave).join(OUT_OF_REACH)

    def _run(self) -> None:
        """Exchange beats through the store, each time in a thread of its own, as the store may not
        answer; if it answers again, as after a launcher that was stopped goes on, so does this."""
        exchange, began, told = None, 0.0, False
        while not self._closing.wait(self.period):
            if exchange is None or not exchange.is_alive():
                exchange, began, told = self._start(self._exchange), time.monotonic(), False
            elif not told and time.monotonic() - began > self.silence:
                told = True
                if self._watch or local_rank() == 0:
                    print_error(
                        f"rank {self._rank} on {os.uname().nodename} has had no answer of the "
                        f"job's store for {self.silence:.0f} s: is its machine or the network down?"
                    )
        if exchange is not None and not told:
            exchange.join(OUT_OF_REACH)

    @staticmethod
    def _start(function: Callable[[], None]) -> Thread:
        """Run a function in a thread that keeps no process alive; returns the thread."""
        thread = Thread(target=function, daemon=True)
        thread.start()
        return thread

    def _exchange(self) -> None:
        with suppress(RuntimeError):  # the store is gone, with its launcher or rank 0
            self._beat()
            if self._watch is None:
                return
            lines = self._watch.look(self._store.multi_get(self._keys), time.monotonic())
            if self._rank == 0 or self._watch.is_silent(0):
                for line in lines:
                    print_error(line)

    def _beat(self) -> None:
        self._beats += 1
        number, call = calls_made()
        self._store.set(self._keys[self._rank], f"{self._beats} {number} {call}")

    def _leave(self) -> None:
        with suppress(RuntimeError):
            self._store.set(self._keys[self._rank], LEFT.decode())


class Watch:
    """What is known of all ranks by their beats, "beats calls name count" each, or LEFT.

    names: of the ranks. silence, lateness: seconds after which a rank is named that says nothing,
    or that has not entered the call in which others are.
    """

    def __init__(self, names: list[str], silence: float, lateness: float):
        self.names, self.silence, self.lateness = names, silence, lateness
        self._beats: list[bytes] = [b""] * len(names)
        self._calls = [0] * len(names)
        self._heard = [0.0] * len(names)  # when each rank's beat was last a new one
        self._moved = [0.0] * len(names)  # when it last entered a call, or was not behind
        self._named: set[int] = set()
        self._looked = -float("inf")

    def is_silent(self, rank: int) -> bool:
        """Say whether a rank had been silent for too long at the last look."""
        return self._beats[rank] != LEFT and self._looked - self._heard[rank] > self.silence

    def look(self, beats: list[bytes], now: float) -> list[str]:
        """Take in all ranks' beats at the time `now`, in seconds, and return what is to be told: a
        line for each rank that is newly absent."""
        if now - self._looked > self.silence / 2:  # this process itself was stopped, or starts
            self._heard = [now] * len(self.names)
            self._moved = [now] * len(self.names)
        self._looked = now
        calls = [0 if beat == LEFT else int(beat.split()[1]) for beat in beats]
        furthest = max(calls)
        for rank, (beat, made) in enumerate(zip(beats, calls, strict=True)):
            if beat != self._beats[rank]:
                self._heard[rank] = now
            if made != self._calls[rank] or made == furthest:
                self._moved[rank] = now
        self._beats, self._calls = beats, calls
        where = _call(beats[calls.index(furthest)])
        every = ((rank, self._line(rank, where)) for rank in range(len(self.names)))
        absent = {rank: line for rank, line in every if line}
        told = [line for rank, line in absent.items() if rank not in self._named]
        self._named = set(absent)
        return told

    def _line(self, rank: int, where: str) -> str | None:
        """Return what to tell of a rank, if it is absent. where: the call in which others are."""
        beat, now = self._beats[rank], self._looked
        if beat == LEFT:
            return None
        if self.is_silent(rank):
            silent = now - self._heard[rank]
            return (
                f"{self.names[rank]} has said nothing for {silent:.0f} s: it was stopped, or its "
                f"machine or network is down; its last call was {_call(beat)}"
            )
        late = now - self._moved[rank]
        if late > self.lateness:
            return (
                f"{self.names[rank]} has not entered {where}, in which others have waited for "
                f"{late:.0f} s; its last call was {_call(beat)}"
            )
        return None


def _call(beat: bytes) -> str:
    """Return the call that a beat names, as "train_batch 17"."""
    return "" if beat == LEFT else beat.decode().split(" ", 2)[2]
