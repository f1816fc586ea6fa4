"""Small files that are read or written whole, and work on many files at once."""

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megazoo.errors import UserError


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


def regular_file(path: str | Path) -> Path:
    """Return a path that is about to be read; UserError if it names a device, a pipe or a socket,
    of which a read may never end. Whether it names anything is told by who opens it."""
    path = Path(path)
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # of no such file, or of a name that can be none
        return path
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UserError(f"{path} is a device or a pipe: give a file")
    return path


def read_bytes(path: Path) -> bytes:
    """Read the bytes of a file; UserError, naming it, if it can't be read."""
    try:
        return regular_file(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def write_text(flag: str, path: Path, text: str) -> None:
    """Write the file of text that a flag asks for; UserError, naming both, if it can't be
    written."""
    try:
        with open(path, "w", opener=open_at_once) as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{flag} {path}: {reason_of(error)}", exit_code=1) from error


def open_at_once(path: str | Path, flags: int) -> int:
    """Open a file to write, as an opener of `open`; of a pipe that nobody reads, raise OSError
    instead of waiting."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


def reason_of(error: OSError) -> str:
    """Return why a file could not be read or written, and what to do where a disk is full."""
    reason = error.strerror or str(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{reason}: make room on its disk" if full else reason


def in_threads(work: Callable[[int], Any], items: Iterable[int]) -> list:
    """Return what `work` gives for each item, four at a time: some files are filled while others go
    to the disk."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(work, items))
