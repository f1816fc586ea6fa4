"""Small files that are read whole, and work on many files at once."""

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megazoo.errors import UserError

try:
    from zlib_ng.zlib_ng import crc32  # several times as fast, where it is installed
except ImportError:
    from zlib import crc32

__all__ = ["crc32", "in_threads", "json_object", "open_own", "read_bytes"]


def json_object(path: Path, data: bytes) -> dict:
    """Read the object that a JSON file, of these bytes, holds; UserError, naming the file, if there
    is none."""
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        comment = error.doc[error.pos :].lstrip().startswith(("//", "/*", "#"))
        hint = "; JSON has no comments: take them out" if comment else ""
        raise UserError(f"{path} can't be read: {error}{hint}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object")
    return value


def read_bytes(path: Path) -> bytes:
    """Read the bytes of a file; UserError, naming it, if it can't be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def open_own(path: Path, *, truncate: bool = False):
    """Open a file of megazoo's own to read and write, and make it if it isn't there; UserError if a
    link lies there, which could lead to any other file, or a pipe.

    truncate: whether what is in it goes.
    """
    flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if truncate else 0)
    try:
        descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):  # as Linux and as BSD say it
            raise UserError(
                f"{path} is a link, and would be written through: remove it", exit_code=1
            ) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path} is not a file: remove it", exit_code=1)
    return os.fdopen(descriptor, "r+b")


def in_threads(work: Callable[[int], Any], items: Iterable[int]) -> list:
    """Return what `work` gives for each item, four at a time: some files are filled while others go
    to the disk."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(work, items))
