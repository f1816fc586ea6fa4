"""Signals that stop a run."""

import os
import select
import signal
import time
from threading import Event, Thread

import torch
import torch.distributed as dist

from megazoo.environment import (
    is_child_of_launcher,
    is_rank_zero,
    megazoos_launcher,
)
from megazoo.launching.local_ranks import SAME
from megazoo.parallel.collectives import all_reduce_over
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import is_of_communication
from megazoo.terminal import print_error

# Seconds from SIGTERM to the end of the step. After that, the process ends without a checkpoint.
PATIENCE = 20.0

# Seconds in which a launcher that was killed has ended, after its ranks have received SIGTERM.
ENDS_WITHIN = 0.5


class StopSignal:
    """Records SIGINT (Ctrl-C), SIGTERM and SIGUSR1 instead of ending the process.

    Slurm sends SIGUSR1 before the time limit. Use it as a context manager. `agreed` returns on all
    ranks whether any rank received a signal. A rank that is stuck still dies of SIGTERM, after
    PATIENCE: launchers also send it to end the remaining ranks of a broken job. A second Ctrl-C
    ends the process immediately.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    LAUNCHER_DIED = 1000  # not a signal number
    END = b"\0"  # not a signal number

    def __init__(self, ctx: ParallelContext):
        self.ctx, self.noted, self._answered = ctx, 0, Event()
        self._parent = os.getppid()
        # Time of the last call of `agreed`, and whether the warning about long steps was printed.
        self._asked: float | None = None
        self._said = False

    def __enter__(self) -> "StopSignal":
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        # Python's signal handlers wait until a collective returns. The interpreter writes to this
        # pipe immediately.
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
        # This ends the thread. A close does not suffice: a forked child may hold the pipe.
        os.write(write, self.END)
        # Join: if a thread dropped the last reference to the context during the interpreter's exit,
        # torch would abort the process (it takes the lock again after it has freed a process
        # group).
        self._watcher.join()
        for end in (self._read, write):
            os.close(end)
        if self.noted and isinstance(error, Exception) and is_of_communication(error):
            # Other ranks ended, and this rank received a signal: a traceback would hide the reason.
            raise SystemExit(128 + self.noted)

    def agreed(self) -> str | None:
        """Return the reason to stop the run, the same on every rank. None: continue.

        The reason is the name of a signal that some rank received, or the death of a launcher.

        Rank 0 warns once if more than PATIENCE passes between two calls under torchrun or Slurm,
        whose SIGTERM would then end the run without a checkpoint. The time before the first call is
        not counted, because the first step may compile.
        """
        now, before = time.monotonic(), self._asked
        self._asked = now
        if before is not None and now - before > PATIENCE and not self._said:
            self._said = True
            self._say_steps_are_long(now - before)
        noted = self.noted
        # On the CPU, so that no device synchronization is needed.
        number = torch.tensor(self.LAUNCHER_DIED if self._is_orphan(noted) else noted)
        all_reduce_over(number, self.ctx.axes, dist.ReduceOp.MAX)
        if not number:
            return None
        self._answered.set()
        if number == self.LAUNCHER_DIED:
            return "the launcher's death"
        return signal.Signals(number.item()).name

    def _is_orphan(self, noted: int) -> bool:
        """Return whether the launcher has died. noted: the signal that was received, or 0.

        The kernel sends SIGTERM when the launcher's main thread ends. The parent of this process
        changes later, when the launcher's last thread ends.
        """
        if not is_child_of_launcher():
            return False
        end = time.monotonic() + ENDS_WITHIN if noted == signal.SIGTERM else 0.0
        while os.getppid() == self._parent:
            if time.monotonic() >= end:
                return False
            time.sleep(0.005)
        return True

    def _note(self, number: int, _frame) -> None:
        self.noted = number

    def _watch(self) -> None:
        """Handle signals during collectives, which delay Python's handlers."""
        interrupted, deadline = None, None
        poll = select.poll()  # not select.select: gloo may use descriptors above 1023
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
                f"warning: a step took {seconds:.0f} s, including the save, but a rank exits "
                f"{PATIENCE:.0f} s after a SIGTERM, even if the step is not saved: {advice}"
            )

    @staticmethod
    def _say_what_follows() -> None:
        if is_rank_zero():
            print_error(
                "Ctrl-C: the run ends after this step, and saves a checkpoint if --save is "
                "set; press Ctrl-C again to end it immediately"
            )


def _instead_of_sigterm() -> str:
    """Return advice for steps longer than Slurm or torchrun wait after SIGTERM. Empty under other
    launchers, which do not send SIGTERM."""
    if is_child_of_launcher() and not megazoos_launcher():
        return (
            "to stop the run, send SIGUSR1 to a rank, which then completes its step; "
            "torchrun forwards SIGTERM, and kills all ranks 30 s later"
        )
    if "SLURM_JOB_ID" in os.environ:
        return "to stop the run, send SIGUSR1, after which it completes its step: --signal=USR1@300"
    return ""
