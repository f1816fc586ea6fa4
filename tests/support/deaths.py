"""Deaths at every call that changes the disk: work is done in a forked child, which ends there and
then, as kill -9 would end it.

A moment is a number: of the calls that change the disk, the first has moment 1 before it and 2
after it, the second 3 and 4.
"""

import builtins
import hashlib
import io
import os
import stat
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

CALLS = (
    "rename replace mkdir rmdir unlink remove link symlink truncate ftruncate fsync write pwrite "
    "posix_fallocate"
).split()
DEAD = 42  # exit code of a child that died as planned
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Moments:
    """Counts the moments of this process, and ends it at one of them. It is never undone."""

    def __init__(self, last: int | None):
        self.last, self.count, self._lock = last, 0, threading.Lock()
        self.exit = os._exit
        for name in CALLS:
            if hasattr(os, name):
                setattr(os, name, self._numbered(getattr(os, name), _on_a_file))
        os.open = self._numbered(os.open, lambda path, flags, *_, **__: flags & WRITING)
        io.open = builtins.open = self._numbered(
            builtins.open, lambda file, mode="r", *_, **__: set(mode) & set("wax+")
        )

    def pass_one(self) -> None:
        with self._lock:
            self.count += 1
            if self.count == self.last:
                self.exit(DEAD)

    def _numbered(self, function: Callable, changes: Callable) -> Callable:
        def call(*args, **kwargs):
            if not changes(*args, **kwargs):
                return function(*args, **kwargs)
            self.pass_one()
            value = function(*args, **kwargs)
            self.pass_one()
            return value

        return call


def _on_a_file(target, *_, **__) -> bool:
    """Say whether a call is about a file: its path, or a descriptor that is no pipe or terminal."""
    return not isinstance(target, int) or not stat.S_ISFIFO(os.fstat(target).st_mode)


def in_a_child(work: Callable[[], None], last: int | None, told: Path) -> int | None:
    """Do some work in a forked child that dies at the moment `last`; returns how many moments the
    work has if it ended well, None if the child died as planned.

    told: a file for what the child says, outside of where it works.
    """
    child = os.fork()
    if child == 0:
        code = 1
        # torch makes its pool anew after a fork, which several threads must not do at once.
        torch.set_num_threads(1)
        try:
            moments = Moments(last)
            work()
            count, moments.last = moments.count, None
            told.write_text(str(count))
            code = 0
        except BaseException:
            moments.last = None
            told.write_text(traceback.format_exc())
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == DEAD:
        return None
    assert code == 0, f"exit code {code}: {told.read_text() if told.exists() else ''}"
    return int(told.read_text())


def tree(directory: Path) -> dict[str, str]:
    """Return all that is in a directory: the paths, and a digest of each file."""
    return {
        str(path.relative_to(directory)): hashlib.sha1(path.read_bytes()).hexdigest()
        if path.is_file()
        else "a directory"
        for path in sorted(directory.rglob("*"))
    }
