"""The launcher of local ranks, for a program that was started as one process.

It works like `torchrun --standalone`, without its error reports of 60 lines, and passes signals on
to the ranks. After Ctrl-C they save and end. A second Ctrl-C ends them immediately. If possible, it
forks the ranks, so that they need not import torch again.
"""

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

import torch
from torch.distributed import TCPStore

from megazoo.environment import LAUNCHER_NAMES, LAUNCHER_PREFIXES, of_local_rank
from megazoo.launching.deaths import death_by, name_of
from megazoo.launching.elastic import SAME
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.terminal import print_error
from megazoo.user_files import user_files

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
PATIENCE = 30.0  # seconds for ranks to end after one has failed, as in torchrun
POLL = 0.05


class Fork:
    """A forked child process, with the subset of subprocess.Popen that is used here."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code of an ended child (negative: its signal), otherwise None."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode


class LocalRanks:
    """The ranks of a program, as processes of this machine.

    Args:
        tp, pp, cp, dp: sizes of the layout.
        command: command that starts a rank. None: fork this process.
        output: standard output of the command, as for subprocess. By default that of this process.
        keep_on_interrupt: pass each Ctrl-C on to ranks that also catch SIGUSR1, and let them
            continue.
    """

    def __init__(
        self,
        tp: int,
        pp: int,
        command: list[str] | None,
        cp: int = 1,
        dp: int = 1,
        output=None,
        keep_on_interrupt: bool = False,
    ):
        self.output, self.keep_on_interrupt = output, keep_on_interrupt
        self.layout, self.command = ParallelContext(Layout(tp=tp, pp=pp, dp=dp, cp=cp)), command
        # The ranks connect here. An open socket reserves its port: no other program can take it.
        self.socket = socket.create_server(("localhost", 0))
        self.processes: list[subprocess.Popen | Fork] = []
        self.told: int | None = None  # first signal that the launcher received
        self.at_once = False
        self._first_interrupt = float("inf")

    def run(self) -> int | None:
        """Start the ranks, wait for their end, and return the common exit code.

        In a forked rank it returns None immediately, and the program continues there.
        """
        for number in PASSED_ON:
            # Background jobs of a shell ignore SIGINT, but their ranks must save as well.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._pass_on)
        if self.command is None:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, exit codes get lost
            gc.freeze()  # otherwise each rank would copy all objects at its exit
        try:
            for rank in range(self.layout.world_size):
                if self.told is None and not self._start(rank):
                    return None
            # Created after the forks, which would not have its thread. The ranks wait for it.
            port, descriptor = self.socket.getsockname()[1], self.socket.detach()
            _store = TCPStore(
                "localhost",
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=descriptor,
            )
            if self.told is not None:  # the signal may have preceded the last rank
                self._send(self.told)
            return self._exit_code(self._wait())
        finally:  # after any error, no rank remains
            self._send(signal.SIGKILL)

    def _wait(self) -> int | None:
        """Wait until all ranks have ended. Return the first that failed, if any. After a failure,
        the other ranks are ended."""
        failed, deadline, running = None, float("inf"), True
        while running:
            time.sleep(POLL)
            running = self._running()  # before the check for failed ranks, which then misses none
            if failed is None:
                failed = next((rank for rank, p in enumerate(self.processes) if p.poll()), None)
                if failed is not None:
                    self._report(failed)
                    self._send(signal.SIGTERM)
                    deadline = time.monotonic() + PATIENCE
            elif time.monotonic() > deadline:
                self._send(signal.SIGKILL)
            else:  # a rank may have noted the first SIGTERM, but not acted on it before its error
                ready = [p for p in running if not _catches(p.pid, signal.SIGTERM)]
                self._send(signal.SIGTERM, ready)
        return failed

    def _start(self, rank: int) -> bool:
        """Start a rank. Return False in the rank itself if it was forked, otherwise True."""
        environment = of_local_rank(rank, self.layout.world_size, self.socket.getsockname()[1])
        if self.command is None:
            return self._fork(environment)
        environment = _without_launcher(os.environ) | environment
        environment.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its share of the cores
        # In a separate session, so that only the launcher receives a terminal's Ctrl-C. It passes
        # the signal on.
        self.processes.append(
            subprocess.Popen(
                self.command, env=environment, start_new_session=True, stdout=self.output
            )
        )
        return True

    def _fork(self, environment: dict[str, str]) -> bool:
        """Fork a rank. Return False in the rank, whose state is that of a newly started process."""
        caught = [number for number in PASSED_ON if signal.getsignal(number) == self._pass_on]
        sys.stdout.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        try:
            pid = os.fork()
            if pid:
                self.processes.append(Fork(pid))
                return True
            self.processes = []
            self.socket.close()
            os.setsid()
            kept = _without_launcher(os.environ)
            os.environ.clear()
            os.environ.update(kept | environment)
            for number in caught:
                usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, usual)
            if isinstance(sys.stdout, TextIOWrapper):
                sys.stdout.reconfigure(line_buffering=True)
            return False
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _running(self) -> list[subprocess.Popen | Fork]:
        return [process for process in self.processes if process.poll() is None]

    def _pass_on(self, number: int, _frame) -> None:
        """Pass a signal on to the ranks. A second Ctrl-C ends them immediately."""
        now, ranks = time.monotonic(), [process.pid for process in self._running()]
        catch = bool(ranks) and all(_catches(pid, signal.SIGUSR1) for pid in ranks)
        if number == signal.SIGINT and self.keep_on_interrupt and catch:
            self._send(number)
            return
        self.told = self.told or number
        if number == signal.SIGINT and self._first_interrupt > now:
            self._first_interrupt = now
        elif number == signal.SIGINT and now > self._first_interrupt + SAME:
            self.at_once, number = True, signal.SIGKILL
        elif number == signal.SIGINT:
            return
        self._send(number)

    def _send(self, number: int, processes: list[subprocess.Popen | Fork] | None = None) -> None:
        for process in self._running() if processes is None else processes:
            # A rank that is not training yet has nothing to save, and SIGINT would make it print a
            # traceback.
            waits = number == signal.SIGINT and not _catches(process.pid, signal.SIGUSR1)
            number_here = signal.SIGTERM if waits else number
            with suppress(ProcessLookupError, PermissionError):  # it has just ended
                try:
                    os.killpg(process.pid, number_here)
                except ProcessLookupError:  # a fork without a separate session yet
                    os.kill(process.pid, number_here)

    def _report(self, rank: int) -> None:
        """Print which rank failed first, unless the launcher received a signal or the rank printed
        its error itself: programs of megazoo exit with 1 or 2 after their error line."""
        code = self._code(rank)
        if self.told is None and code not in (1, 2):
            what = death_by(-code) if code < 0 else f"ended with exit code {code}"
            print_error(f"{name_of(rank, self.layout)} on {os.uname().nodename} {what}")

    def _code(self, rank: int) -> int:
        """Return the exit code of an ended rank (negative: its signal)."""
        code = self.processes[rank].poll()
        assert code is not None
        return code

    def _exit_code(self, failed: int | None) -> int:
        """Return 0 if all ranks succeeded, otherwise the exit code of the first that failed.

        For a signal it is 128 + its number, as in shells.
        """
        if self.at_once:
            return 128 + signal.SIGINT
        if failed is None:
            return 0 if len(self.processes) == self.layout.world_size else 128 + (self.told or 0)
        code = self._code(failed)
        if self.told and code in (-signal.SIGTERM, -self.told, 128 + signal.SIGTERM):
            return 128 + self.told
        return 128 - code if code < 0 else code


def can_fork() -> bool:
    """Return whether ranks can be forked from this process.

    A forked child has none of its threads, and cannot use CUDA after this process has initialized
    it. A user's --import file may have started threads or CUDA. Only Python's threads are detected,
    so torch must not have computed anything before: a child would wait for torch's threads.
    """
    return (
        sys.platform == "linux"
        and threading.active_count() == 1
        and not torch.cuda.is_available()
        and not user_files
    )


def _without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of a launcher."""
    return {
        name: value
        for name, value in environment.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)
    }


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal. True if unknown."""
    status = ""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"SigCgt:\s*(\w+)", status)
    return caught is None or bool(int(caught[1], 16) >> (number - 1) & 1)
