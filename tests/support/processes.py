"""Programs that are started whole, watched, signalled and killed."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from megazoo.launching.local_ranks import catches
from tests.support.pretraining import ROOT, SMALL
from tests.support.programs import MARK, marked

JOB = ["pretrain_gpt.py", *SMALL, "--eval-steps", "0", "--steps", "100000"]
SOON = 60.0  # seconds, on a machine that does much else


class Program:
    """A program in a process group of its own, as a terminal starts it.

    program: what is started, by default Python itself. ignored: the signals that it inherits as
    ignored, as nohup and background jobs do. environment: variables beside this process's own.
    """

    def __init__(self, *arguments, program=sys.executable, ignored=(), **environment):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        clean = {name: value for name, value in os.environ.items() if name not in names}
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [program, *map(str, arguments)],
            cwd=ROOT,
            env=clean | {"PYTHONPATH": str(ROOT), MARK: self.mark} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
            preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in ignored],
        )
        self.out, self.err, self.ranks = [], [], []
        self._readers = [
            threading.Thread(target=lines.extend, args=(stream,), daemon=True)
            for lines, stream in ((self.out, self.process.stdout), (self.err, self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def text(self) -> str:
        """What it has printed, then what it has said of mistakes."""
        return "".join([*self.out, *self.err])

    def wait_for(self, words, timeout=90, after=0):
        """Until it has printed these words, in a line after so many."""
        end = time.monotonic() + timeout
        while words not in "".join(self.out[after:]):
            assert time.monotonic() < end, f"no {words!r} in {self.out} {self.err}"
            assert self.process.poll() is None, f"ended without {words!r}: {self.out} {self.err}"
            time.sleep(0.02)
        self.find_ranks()

    def wait_for_ranks(self, count, timeout=90):
        """Until so many are there, and Python would turn SIGINT into a KeyboardInterrupt."""
        end = time.monotonic() + timeout
        while len(self.ranks) < count or not all(catches(pid, signal.SIGINT) for pid in self.ranks):
            assert time.monotonic() < end, self.ranks
            time.sleep(0.02)
            self.find_ranks()

    def find_ranks(self):
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self.ranks = [child for child in map(int, children) if is_rank(child)]

    def rank(self, number) -> int:
        """The process of a rank."""
        return self.ranks[number]  # in the order in which they were started

    def interrupt(self):
        """What a terminal does at Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, timeout=SOON) -> int:
        """The exit code, once the program and its ranks have ended."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout} s:\n{self.text[-3000:]}")
        until = time.monotonic() + timeout
        while any(map(lives, self.ranks)):
            assert time.monotonic() < until, f"left behind: {self.ranks}"
            time.sleep(0.02)
        for reader in self._readers:
            reader.join(timeout)
        return code

    def clear(self):
        """Leave no process behind: ranks have sessions of their own."""
        for pid in (self.process.pid, *self.ranks, *marked(self.mark)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


def is_rank(pid) -> bool:
    """Whether a launcher's child is a rank: torchrun may have others."""
    with suppress(OSError):  # it has ended meanwhile
        return b"pretrain" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def lives(pid) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
