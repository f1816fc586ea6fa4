"""The launcher of local ranks: torch.multiprocessing forks them, and one line reports a failure.

It passes signals on to the ranks. After Ctrl-C they save and end. A second Ctrl-C ends them
immediately.
"""

import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.multiprocessing import start_processes

from megazoo.environment import LAUNCHER_NAMES, LAUNCHER_PREFIXES, of_local_rank
from megazoo.parallel import ending
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.terminal import print_error
from megazoo.torch_internals import end_openmp_threads

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
PATIENCE = 30.0  # seconds for ranks to end after one has failed, as in torchrun
POLL = 0.05
# Seconds within which signals count as one Ctrl-C: a rank may receive it directly and from a
# launcher.
SAME = 0.5


def name_of(rank: int, ctx: ParallelContext) -> str:
    """Return a rank's number and its coordinates in the layout."""
    place = ctx.place_of(rank)
    axes = ("tp", "pp", "dp") if ctx.cp_size == 1 else ("tp", "pp", "cp", "dp")
    return f"rank {rank} ({', '.join(f'{axis} {place[axis]}' for axis in axes)})"


def death_by(number: int) -> str:
    """Return the message for a process that died of a signal."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = f"signal {number}"
    hint = ": out of memory, perhaps" if number == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


class LocalRanks:
    """The ranks of a layout, as forked processes of this machine.

    Attributes:
        failed: the first rank that failed, if any.
        received: the first signal that ends the ranks, if this process received one.

    Args:
        layout: layout of the ranks.
        work: function that runs in each rank.
        report: prints the line about a rank that failed without a message.
        keep_on_interrupt: pass each Ctrl-C on to ranks that also catch SIGUSR1, and let them
            continue.
    """

    def __init__(
        self,
        layout: Layout,
        work: Callable[[], None],
        *,
        report: Callable[[str], None] = print_error,
        keep_on_interrupt: bool = False,
    ):
        self.ctx, self.work = ParallelContext(layout), work
        self.report, self.keep_on_interrupt = report, keep_on_interrupt
        self.failed: int | None = None
        self.received: int | None = None
        self._processes: list[Any] = []  # of multiprocessing
        self._at_once, self._first_interrupt = False, float("inf")

    def run(self) -> int:
        """Start the ranks, wait for their end, and return the common exit code.

        It is 0 if all ranks succeeded, otherwise that of the first that failed. For a signal it is
        128 + its number, as in shells.
        """
        end_openmp_threads()
        # The ranks connect here. An open socket reserves its port: no other program can take it.
        reserved = socket.create_server(("localhost", 0))
        port, world = reserved.getsockname()[1], self.ctx.world_size
        environments = [of_local_rank(rank, world, port) for rank in range(world)]
        # Background jobs of a shell ignore SIGINT, but their ranks must save as well. nohup ignores
        # SIGHUP, as the ranks must.
        caught = [
            number
            for number in PASSED_ON
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        ]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until all ranks are there
        before = {number: signal.signal(number, self._pass_on) for number in caught}
        # if it is ignored, exit codes get lost
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        stdin, sys.stdin = sys.stdin, None  # multiprocessing would close it in the ranks
        try:
            try:
                arguments = (environments, reserved, caught, mask, stdin)
                started = start_processes(
                    self._run_rank, arguments, world, join=False, start_method="fork"
                )
                assert started is not None  # as it does not join
                self._processes = started.processes
            finally:
                sys.stdin = stdin
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            # Created after the forks, which would not have its thread. The ranks wait for it.
            _store = TCPStore(
                "localhost",
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=reserved.detach(),
            )
            self._wait()
        finally:  # after any error, no rank remains
            self._send(signal.SIGKILL, self._processes)
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._at_once:
            return 128 + signal.SIGINT
        code = 0 if self.failed is None else self._processes[self.failed].exitcode or 0
        if self.received and code in (-signal.SIGTERM, -self.received, 128 + signal.SIGTERM):
            return 128 + self.received
        return 128 - code if code < 0 else code

    def _run_rank(self, rank: int, environments, reserved, caught, mask, stdin) -> None:
        """Work in a forked rank, whose state is that of a newly started process."""
        reserved.close()
        os.setsid()  # so that only the launcher receives a terminal's Ctrl-C
        for name in list(os.environ):
            if name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES):
                del os.environ[name]
        os.environ.update(environments[rank])
        for number in caught:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        sys.stdin = stdin
        if isinstance(sys.stdout, TextIOWrapper):  # not in notebooks
            sys.stdout.reconfigure(line_buffering=True)
        try:
            self.work()
        except BaseException as error:
            ending.leave()
            if isinstance(error, Exception):
                traceback.print_exc()
                sys.exit(1)
            raise
        ending.close()

    def _wait(self) -> None:
        """Wait until all ranks have ended. After a failure, end the other ranks."""
        deadline, running = float("inf"), self._processes
        while running:
            time.sleep(POLL)
            # before the check for failed ranks, which then misses none
            running = [process for process in self._processes if process.exitcode is None]
            if self.failed is None:
                codes = [process.exitcode for process in self._processes]
                self.failed = next((rank for rank, code in enumerate(codes) if code), None)
                if self.failed is not None:
                    self._report(self.failed, codes[self.failed])
                    self._send(signal.SIGTERM, running)
                    deadline = time.monotonic() + PATIENCE
            elif time.monotonic() > deadline:
                self._send(signal.SIGKILL, running)
            else:  # a rank may have noted the first SIGTERM, but not acted on it before its error
                ready = [p for p in running if not catches(p.pid, signal.SIGTERM)]
                self._send(signal.SIGTERM, ready)

    def _report(self, rank: int, code: int) -> None:
        """Report the first rank that failed, unless this process received a signal or the rank
        printed its error itself: ranks exit with 1 or 2 after their error line."""
        if self.received is None and code not in (1, 2):
            what = death_by(-code) if code < 0 else f"ended with exit code {code}"
            self.report(f"{name_of(rank, self.ctx)} on {os.uname().nodename} {what}")

    def _pass_on(self, number: int, _frame) -> None:
        """Pass a signal on to the ranks. A second Ctrl-C ends them immediately."""
        now, ranks = time.monotonic(), self._processes
        catch = all(catches(process.pid, signal.SIGUSR1) for process in ranks)
        if number == signal.SIGINT and self.keep_on_interrupt and catch:
            self._send(number, ranks)
            return
        self.received = self.received or number
        if number == signal.SIGINT and self._first_interrupt > now:
            self._first_interrupt = now
        elif number == signal.SIGINT and now > self._first_interrupt + SAME:
            self._at_once, number = True, signal.SIGKILL
        elif number == signal.SIGINT:
            return
        self._send(number, ranks)

    @staticmethod
    def _send(number: int, processes: Iterable[Any]) -> None:
        """Send a signal to the sessions of the ranks that have not ended."""
        for process in processes:
            if process.exitcode is not None:
                continue
            # A rank that is not training yet has nothing to save, and SIGINT would make it print a
            # traceback.
            waits = number == signal.SIGINT and not catches(process.pid, signal.SIGUSR1)
            number_here = signal.SIGTERM if waits else number
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(process.pid, number_here)


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal. True if unknown."""
    status = ""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"SigCgt:\s*(\w+)", status)
    return caught is None or bool(int(caught[1], 16) >> (number - 1) & 1)
