"""What a run does when it is sent a signal to stop, and when a rank dies or stalls."""

import os
import select
import signal
import time
from contextlib import contextmanager
from threading import Event, Thread

import torch
import torch.distributed as dist

from megazoo.cli.launch.deaths import name_of
from megazoo.cli.launch.heartbeat import heartbeat
from megazoo.environment import (
    is_child_of_launcher,
    is_rank_zero,
    megazoos_launcher,
)
from megazoo.parallel.collectives import all_reduce_over
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import is_of_communication
from megazoo.terminal import print_error
from megazoo.torch_internals import default_store

# Seconds from a signal to the end of the step; then SIGTERM does what it does by itself.
PATIENCE = 20.0
# Seconds within which signals are one Ctrl-C: a launcher passes on what a rank has got itself.
SAME = 0.5
GRACE = 3.0  # seconds in which ranks that wait in vain tell each other so
OUT_OF_REACH = 5.0  # seconds more, after which the job's store is taken to be out of reach


class StopSignal:
    """Notes SIGINT (Ctrl-C), SIGTERM and SIGUSR1 (which Slurm sends before the time is up) instead
    of dying of them.

    Use it as a context; `agreed` tells all ranks together whether any of them was told to stop. A
    rank that is stuck and can't answer SIGTERM dies of it after all: a launcher sends it, too, to
    end what is left of a broken job. A second Ctrl-C ends the process at once.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    LAUNCHER_DIED = 1000  # no signal's number
    END = b"\0"  # no signal's number, either

    def __init__(self, ctx: ParallelContext):
        self.ctx, self.noted, self._answered = ctx, 0, Event()
        self._parent = os.getppid()
        # when `agreed` was last asked, and whether it was said that this is too seldom
        self._asked: float | None = None
        self._said = False

    def __enter__(self) -> "StopSignal":
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        # Python's handlers wait until a collective returns; the interpreter writes to this pipe at
        # once.
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        self._write = (write, signal.set_wakeup_fd(write, warn_on_full_buffer=False))
        self._watcher = Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        write, before = self._write
        signal.set_wakeup_fd(before)
        self._answered.set()
        # Ends the thread. Closing is not enough: a forked child may hold the pipe, too.
        os.write(write, self.END)
        # Waited for: if the last reference to the context went with a thread while the interpreter
        # ends, torch would abort the process (it takes the lock again after it has freed a process
        # group).
        self._watcher.join()
        for end in (self._read, write):
            os.close(end)
        if self.noted and isinstance(error, Exception) and is_of_communication(error):
            # Others are gone, and this rank was told to go, too: a traceback would only hide why.
            raise SystemExit(128 + self.noted)

    def agreed(self) -> str | None:
        """Return what stops the run, the same on every rank: the name of a signal that some rank
        was sent, or the death of a launcher. None if nothing does.

        Rank 0 warns, once, when longer than PATIENCE passes between two calls under torchrun or
        Slurm, which send SIGTERM: it would end the run without a checkpoint. What passes before the
        first call is not counted: the first step may compile.
        """
        now, before = time.monotonic(), self._asked
        self._asked = now
        if before is not None and now - before > PATIENCE and not self._said:
            self._said = True
            self._say_steps_are_long(now - before)
        orphaned = is_child_of_launcher() and os.getppid() != self._parent
        # On the CPU: no device is to be waited for.
        number = torch.tensor(self.LAUNCHER_DIED if orphaned else self.noted)
        all_reduce_over(number, self.ctx.axes, dist.ReduceOp.MAX)
        if not number:
            return None
        self._answered.set()
        if number == self.LAUNCHER_DIED:
            return "the launcher's death"
        return signal.Signals(number.item()).name

    def _note(self, number: int, _frame) -> None:
        self.noted = number

    def _watch(self) -> None:
        """Do what can't wait until Python's handlers run: they wait while a collective does."""
        interrupted, deadline = None, None
        poll = select.poll()  # select.select takes no descriptor above 1023: gloo may have those
        poll.register(self._read, select.POLLIN)
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0) * 1000
            if not poll.poll(left):
                if not self._answered.is_set():
                    os._exit(128 + signal.SIGTERM)
                deadline = None
                continue
            numbers, now = os.read(self._read, 16), time.monotonic()
            if self.END in numbers:
                return
            ending = signal.SIGINT in numbers or signal.SIGTERM in numbers
            if ending and interrupted and now > interrupted + SAME:
                os._exit(128 + signal.SIGINT)
            if signal.SIGINT in numbers and not interrupted:
                interrupted = now
                self._say_what_follows()
            if signal.SIGTERM in numbers and deadline is None:
                deadline = now + PATIENCE

    @staticmethod
    def _say_steps_are_long(seconds: float) -> None:
        advice = _instead_of_sigterm()
        if is_rank_zero() and advice:
            print_error(
                f"warning: a step took {seconds:.0f} s, saving included, but {PATIENCE:.0f}"
                f" s after a SIGTERM a rank ends at once, unsaved: {advice}"
            )

    @staticmethod
    def _say_what_follows() -> None:
        if is_rank_zero():
            print_error(
                "Ctrl-C: the run ends after this step, and saves if there is --save; "
                "a second one ends it at once"
            )


def _instead_of_sigterm() -> str:
    """Return what to do where a step is longer than Slurm or torchrun wait after SIGTERM; empty
    under other launchers, which send none."""
    if is_child_of_launcher() and not megazoos_launcher():
        return (
            "to stop the run, send SIGUSR1 to a rank, which waits for the step; torchrun passes on "
            "SIGTERM, and kills all ranks 30 s later"
        )
    if "SLURM_JOB_ID" in os.environ:
        return "to stop the run, send SIGUSR1, which waits for the step: --signal=USR1@300"
    return ""


@contextmanager
def naming_absent_ranks(ctx: ParallelContext):
    """Name the absent ranks on stderr, if a wait for them fails within or takes longer than the
    groups' timeout.

    Every rank that waited in vain says so in the job's store; those that have not are the ones
    waited for. Before that, and where waits end the process, as NCCL's do, `heartbeat` names them.
    All ranks enter it together.
    """
    try:
        with heartbeat(ctx):
            yield
    except RuntimeError as error:
        if ctx.world_size > 1 and is_of_communication(error):
            teller = Thread(
                target=_tell_absent, args=(ctx, str(error).splitlines()[0]), daemon=True
            )
            teller.start()
            teller.join(GRACE + OUT_OF_REACH)
            if teller.is_alive():
                print_error(
                    f"rank {ctx.rank} on {os.uname().nodename} can't reach the others any more, "
                    "nor the job's store: is a node or its network down?"
                )
        raise


def _tell_absent(ctx: ParallelContext, reason: str) -> None:
    """Say in the job's store that this rank waited in vain; the first that did names the absent."""
    try:
        store = default_store()
        store.set(f"waited in vain/{ctx.rank}", "")
        time.sleep(GRACE)
        there = [rank for rank in range(ctx.world_size) if store.check([f"waited in vain/{rank}"])]
    except RuntimeError as error:
        print_error(f"rank {ctx.rank} can't reach the job's store: {error}")
        return
    absent = [rank for rank in range(ctx.world_size) if rank not in there]
    # Without a timeout a connection broke: the launcher says whose.
    if ctx.rank == min(there) and "timed out" in reason.lower():
        who = ", ".join(name_of(rank, ctx) for rank in absent)
        print_error(
            f"no word from {who or 'no rank: all waited for each other'}: "
            f"it stalled longer than the timeout, or died ({reason})"
        )
