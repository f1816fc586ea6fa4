"""Report immediately which rank died and why, before the launcher's report."""

import os
import select
import signal
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from megazoo.environment import megazoos_launcher
from megazoo.launching.local_ranks import death_by, name_of
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.context import ParallelContext
from megazoo.terminal import print_error
from megazoo.torch_internals import default_store

# Signals by which launchers and users end a job. Ranks that die of these are not reported.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def naming_dead_ranks(ctx: ParallelContext):
    """Name ranks of this machine that die inside the context, on stderr. All ranks enter it
    together.

    Each rank watches the next rank of its machine, and after its death the rank after it. It does
    nothing on systems other than Linux, and under megazoo's launcher, which reports deaths itself.
    """
    if ctx.world_size == 1 or megazoos_launcher():
        yield
        return
    here = _machine()
    ranks = all_gather_objects((here, os.getpid()), ctx)
    others = [*range(ctx.rank + 1, ctx.world_size), *range(ctx.rank)]
    neighbours = [rank for rank in others if here and ranks[rank][0] == here]
    watch = _Watch([(name_of(rank, ctx), rank, ranks[rank][1]) for rank in neighbours])
    try:
        yield
        with suppress(RuntimeError):  # the store ended with its launcher or rank 0
            default_store().set(_left(ctx.rank), "")
    finally:
        watch.close()


class _Watch:
    """A thread that waits for the death of processes, one after the other, and reports it."""

    def __init__(self, neighbours: list[tuple[str, int, int]]):
        self._neighbours, self._handles = [], []
        for name, rank, pid in neighbours:
            with suppress(OSError):  # it has ended, or a container forbids it
                self._handles.append(os.pidfd_open(pid))
                self._neighbours.append((name, rank, pid))
        self._closing, self._close = os.pipe()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait until it has stopped using the store."""
        os.write(self._close, b"end")  # a close does not suffice: a forked child may hold the pipe
        self._thread.join()
        for handle in (*self._handles, self._closing, self._close):
            os.close(handle)

    def _watch(self) -> None:
        for handle, (name, rank, pid) in zip(self._handles, self._neighbours, strict=True):
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.register(self._closing, select.POLLIN)
            if any(ready == self._closing for ready, _ in poll.poll()):
                return
            text = _death(pid, rank)
            if text is None:  # the rank has reported later deaths itself
                return
            print_error(f"{name} on {os.uname().nodename} {text}")


def _death(pid: int, rank: int) -> str | None:
    """Return the message for a process that ended. None if it ended normally, printed an error
    itself, or received a signal to end."""
    status = _wait_status(pid)
    if status is None:
        with suppress(RuntimeError):
            if default_store().check([_left(rank)]):
                return None
        return "has died"
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) not in ENDING:
        return death_by(os.WTERMSIG(status))
    return None


def _wait_status(pid: int) -> int | None:
    """Return the wait status of an ended process, as from waitpid. None if its parent has already
    waited for it."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] in "ZX":
            return int(fields[-1])
    return None


def _left(rank: int) -> str:
    """Return the key in the job's store that a rank sets when it ends normally."""
    return f"megazoo/left/{rank}"


def _machine() -> tuple | None:
    """Return a value that is equal for processes that can watch each other. None: not supported."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return boot, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
