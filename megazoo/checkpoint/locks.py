"""Locks of directories: only one program at a time writes there; the error of a second one names
the first.

A lock is held on a file next to the output. The system releases the lock when its holder dies. A
remaining lock file is reused by the next program.
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

# Errors of a file system without such locks: megazoo then works without a lock.
UNSUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.ENOSYS}
MOMENT = 0.5  # seconds to wait for a program that only checks whether the lock is free
# Seconds that a restarted job waits for the lock: a file server releases the lock of a node that
# went down after its lease, 90 s in most NFS servers.
LEASE = 100.0
MARK = '{"megazoo": "lock"'  # the start of the text of a lock file
LONGEST = 4096  # bytes of that text

_held: set["Lock"] = set()  # by this process


class Lock:
    """A lock that is held within its block. UserError if another program holds it.

    file: the lock file, which exists while the lock is held. busy, advice: the start and the end of
    the error; between them it describes the holder.
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
                if self._is_named(file):  # otherwise its last holder has just removed it
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
            with suppress(OSError):  # a remaining file is reused by the next program
                if self._is_named(self._opened):
                    os.unlink(self.file)
        finally:
            self.let_go()
            _held.discard(self)

    def check(self) -> None:
        """Raise UserError if another program holds the lock now. A restarted job does not check: it
        waits for the lock when it acquires it."""
        if restarts():
            return
        try:
            file = self._open(create=False)
        except OSError:  # there is no lock file; or it can't be opened, an error when acquiring it
            return
        with file:
            self._lock(file, fcntl.LOCK_SH, time.monotonic())

    def let_go(self) -> None:
        """Close the file. A forked process does only this: its parent still holds the lock."""
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
        """Return whether the path of the lock still names the open file."""
        try:
            return os.path.samestat(os.lstat(self.file), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False

    def _sign(self, file: BinaryIO) -> None:
        """Write the holder of the lock into its file."""
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
        except OSError:  # the disk is full: the lock works without the text
            os.ftruncate(file.fileno(), 0)

    def _is_not_ours(self) -> UserError:
        return UserError(f"{self.file} is not a lock file of megazoo: move it away")


def run_lock(directory: Path) -> Lock:
    """Return the lock of a directory in which a run saves its steps."""
    return Lock(
        directory / ".lock",
        f"{directory}: another run is saving there",
        "give another --save, or wait",
    )


def output_lock(directory: Path) -> Lock:
    """Return the lock of a directory that is written as a whole. The lock file is next to the
    directory."""
    return Lock(
        directory.parent / f".{directory.name}.lock",
        f"{directory}: another program is writing it",
        "choose another, or wait",
    )


def _holder(file: BinaryIO) -> str:
    """Return a description of the holder of a lock."""
    try:
        holder = json.loads(os.pread(file.fileno(), LONGEST, 0))
        words = "process {process} on {host} since {since}, {command}".format(**holder)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "its lock file does not name it"
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def _forget() -> None:
    for lock in _held:
        lock.let_go()
    _held.clear()


os.register_at_fork(after_in_child=_forget)
