"""Locks of directories: one program at a time writes there, and who comes second is told who does.

A lock is held through a file that lies beside what is written. The system gives it back when its
holder dies, however that happens; what remains of the file is taken over by the next one.
"""

import errno
import fcntl
import json
import os
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from megazoo.environment import restarts
from megazoo.errors import UserError
from megazoo.files import open_own

# How a file system says that it has no such locks: it goes without.
UNSUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.ENOSYS}
MOMENT = 0.5  # seconds in which one that only looks whether the lock is free lets go of it
# Seconds that a restarted job waits for it: a file server gives back the lock of a node that went
# down after its lease, 90 s in most NFS servers.
LEASE = 100.0
MARK = '{"megazoo": "lock"'  # how the text of a lock's file begins
LONGEST = 4096  # bytes of that text

_held: set["Lock"] = set()  # by this process


class Lock:
    """A lock, held within its block. UserError if another holds it.

    file: which is there while it is held. busy, advice: what a second one is told, before and after
    the words for who the first one is.
    """

    def __init__(self, file: Path, busy: str, advice: str):
        self.file, self.busy, self.advice = file, busy, advice
        self._opened: BinaryIO | None = None

    def __enter__(self) -> "Lock":
        until = time.monotonic() + (LEASE if restarts() else MOMENT)
        while True:
            file = self._open()
            try:
                self._lock(file, fcntl.LOCK_EX, until)
                if self._is_named(file):  # else its last holder has just removed it
                    self._sign(file)
                    break
            except BaseException:
                file.close()
                raise
            file.close()
        self._opened = file
        _held.add(self)
        return self

    def __exit__(self, *_) -> None:
        if self._opened is None:  # in a process that was forked meanwhile
            return
        try:
            with suppress(OSError):  # a file that stays is taken over by the next one
                if self._is_named(self._opened):
                    os.unlink(self.file)
        finally:
            self.let_go()
            _held.discard(self)

    def check(self) -> None:
        """Raise UserError if another holds it now, unless this job was restarted: then it is waited
        for when it is taken."""
        if restarts():
            return
        try:
            file = self._open(create=False)
        except OSError:  # there is none, or it can't be held: who takes it hears of that
            return
        with file:
            self._lock(file, fcntl.LOCK_SH, time.monotonic())

    def let_go(self) -> None:
        """Close the file. A forked process does no more: its parent holds the lock still."""
        if self._opened:
            self._opened.close()
        self._opened = None

    def _open(self, create: bool = True) -> BinaryIO:
        try:
            return open_own(self.file, create=create)
        except UserError as error:
            raise self._is_not_ours() from error

    def _lock(self, file: BinaryIO, kind: int, until: float) -> None:
        while True:
            try:
                return fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise UserError(f"{self.busy}: {_holder(file)}: {self.advice}") from None
                time.sleep(0.02)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                return None

    def _is_named(self, file: BinaryIO) -> bool:
        """Whether the lock's name still leads to the file that is open."""
        try:
            return os.path.samestat(os.lstat(self.file), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False

    def _sign(self, file: BinaryIO) -> None:
        """Write who holds the lock."""
        before = os.pread(file.fileno(), LONGEST, 0).decode(errors="replace")
        if not before.startswith(MARK[: len(before)]):
            raise self._is_not_ours()
        holder = {
            "megazoo": "lock",
            "process": os.getpid(),
            "host": os.uname().nodename,
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": shlex.join(sys.argv)[:200],
        }
        os.ftruncate(file.fileno(), 0)
        try:
            os.pwrite(file.fileno(), json.dumps(holder).encode(), 0)
        except OSError:  # of a full disk: the lock is as good
            os.ftruncate(file.fileno(), 0)

    def _is_not_ours(self) -> UserError:
        return UserError(f"{self.file} is not a lock of megazoo's: move it")


def run_lock(directory: Path) -> Lock:
    """Return the lock of a directory in which a run saves its steps."""
    return Lock(
        directory / ".lock",
        f"{directory}: another run is saving there",
        "give another --save, or wait",
    )


def output_lock(directory: Path) -> Lock:
    """Return the lock of a directory that is written as a whole. It lies beside it."""
    return Lock(
        directory.parent / f".{directory.name}.lock",
        f"{directory}: another program is writing it",
        "choose another, or wait",
    )


def _holder(file: BinaryIO) -> str:
    """Return the words for who holds a lock."""
    try:
        holder = json.loads(os.pread(file.fileno(), LONGEST, 0))
        words = "process {process} on {host} since {since}, {command}".format(**holder)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "it has not said who it is"
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def _forget() -> None:
    for lock in _held:
        lock.let_go()
    _held.clear()


os.register_at_fork(after_in_child=_forget)
