"""Name absent ranks while the other ranks still wait for them.

A rank that waits in NCCL cannot name them: its main thread hangs in CUDA until NCCL's watchdog ends
the process without naming a rank. Therefore each rank has a thread that writes a beat with its
current call to the job's store every few seconds. If a rank's beats stop, the process was stopped,
or its machine or network is down. If its beats continue but it has not entered the call of the
other ranks, it hangs in another place.
"""

import os
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from threading import Event, Thread

from megazoo.environment import local_rank
from megazoo.launching.local_ranks import name_of
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import calls_made
from megazoo.terminal import print_error
from megazoo.torch_internals import store_of_a_thread

PERIOD = 5.0  # seconds between beats, at most a tenth of the groups' timeout
SILENCE = 30.0  # seconds without a beat until a rank is named, at most half of the timeout
OUT_OF_REACH = 5.0  # seconds to wait at the end for a store that does not answer
LEFT = b"left"  # last beat of a rank that ended normally or with an error that it prints


@contextmanager
def heartbeat(ctx: ParallelContext):
    """Name ranks that are silent or late for a call on stderr. All ranks enter the context
    together.

    Rank 0 prints the names, or the last rank if rank 0 is silent. If the store does not answer,
    both ranks and the first rank of each machine print a message. A rank is late if others entered
    a call at least half of the groups' timeout ago and it has not entered a call since.
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
    """The thread of one rank. It has no reference to the context, so it never drops the last."""

    def __init__(self, ctx: ParallelContext):
        timeout = ctx.timeout.total_seconds()
        self.period, self.silence = min(PERIOD, timeout / 10), min(SILENCE, timeout / 2)
        self._store, self._beats = store_of_a_thread(), 0
        self._keys = [f"megazoo/{ctx.name}/beat/{rank}" for rank in range(ctx.world_size)]
        self._rank, self._closing, self._watch = ctx.rank, Event(), None
        self._beat()
        hosts = all_gather_objects(os.uname().nodename, ctx)  # after it, each rank has a beat
        if ctx.rank in (0, ctx.world_size - 1):
            names = [f"{name_of(rank, ctx)} on {host}" for rank, host in enumerate(hosts)]
            self._watch = Watch(names, self.silence, timeout / 2)
        self._thread = self._start(self._run)

    def close(self) -> None:
        """End the thread, and mark this rank as left, so that others stop watching it."""
        self._closing.set()
        self._thread.join()
        self._start(self._leave).join(OUT_OF_REACH)

    def _run(self) -> None:
        """Exchange beats through the store. Each exchange runs in a separate thread, because the
        store may not answer. When the store answers again, the exchanges continue."""
        exchange, began, told = None, 0.0, False
        while not self._closing.wait(self.period):
            if exchange is None or not exchange.is_alive():
                exchange, began, told = self._start(self._exchange), time.monotonic(), False
            elif not told and time.monotonic() - began > self.silence:
                told = True
                if self._watch or local_rank() == 0:
                    print_error(
                        f"rank {self._rank} on {os.uname().nodename} has had no answer from the "
                        f"job's store for {self.silence:.0f} s: is its machine or the network down?"
                    )
        if exchange is not None and not told:
            exchange.join(OUT_OF_REACH)

    @staticmethod
    def _start(function: Callable[[], None]) -> Thread:
        """Start a daemon thread that runs a function, and return it."""
        thread = Thread(target=function, daemon=True)
        thread.start()
        return thread

    def _exchange(self) -> None:
        with suppress(RuntimeError):  # the store ended with its launcher or rank 0
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
    """The state of all ranks according to their beats, each "beats calls name count" or LEFT.

    Args:
        names: names of the ranks.
        silence: seconds without a beat after which a rank is named.
        lateness: seconds after which a rank is named that has not entered the call of the others.
    """

    def __init__(self, names: list[str], silence: float, lateness: float):
        self.names, self.silence, self.lateness = names, silence, lateness
        self._beats: list[bytes] = [b""] * len(names)
        self._calls = [0] * len(names)
        self._heard = [0.0] * len(names)  # time of each rank's last new beat
        self._moved = [0.0] * len(names)  # time when it last entered a call or was not behind
        self._named: set[int] = set()
        self._looked = -float("inf")

    def is_silent(self, rank: int) -> bool:
        """Return whether a rank was silent for too long at the last call of `look`."""
        return self._beats[rank] != LEFT and self._looked - self._heard[rank] > self.silence

    def look(self, beats: list[bytes], now: float) -> list[str]:
        """Update the state, and return a line for each newly absent rank.

        Args:
            beats: beats of all ranks.
            now: time in seconds.
        """
        if now - self._looked > self.silence / 2:  # this process was stopped, or has just started
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
        """Return the message for a rank if it is absent. where: the call of the other ranks."""
        beat, now = self._beats[rank], self._looked
        if beat == LEFT:
            return None
        if self.is_silent(rank):
            silent = now - self._heard[rank]
            return (
                f"{self.names[rank]} has not responded for {silent:.0f} s: it was stopped, or its "
                f"machine or network is down; its last call was {_call(beat)}"
            )
        late = now - self._moved[rank]
        if late > self.lateness:
            return (
                f"{self.names[rank]} has not called {where}, in which other ranks have waited "
                f"for {late:.0f} s; its last call was {_call(beat)}"
            )
        return None


def _call(beat: bytes) -> str:
    """Return the call in a beat, such as "train_batch 17"."""
    return "" if beat == LEFT else beat.decode().split(" ", 2)[2]
