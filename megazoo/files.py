"""Reads and writes small files, checks the types of their values, and works on files in
parallel."""

import codecs
import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from megazoo.errors import UserError

POINTER = b"version https://git-lfs.github.com/spec/"  # the start of a pointer of Git LFS
# The words in messages for the types of msgspec.
KINDS = {
    "int": "an int",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def json_object(path: Path, data: bytes) -> dict:
    """Parse the bytes of a JSON file that holds an object; UserError with the file's name if it
    holds something different."""
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        comment = error.doc[error.pos :].lstrip().startswith(("//", "/*", "#"))
        hint = "; JSON has no comments: remove them" if comment else ""
        raise UserError(f"{path} can't be read: {error}{hint}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {brief(value)}, but must hold a JSON object")
    return value


def regular_file(path: str | Path, *, or_pipe: bool = False) -> Path:
    """Return a path that is about to be read; UserError if it is a device, a pipe or a socket, of
    which a read may never end. A missing file is not an error here.

    or_pipe: accept a pipe, such as <(command) in a shell, which only this process reads, and only
    once from start to end.
    """
    path = Path(path)
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # a missing file, or an invalid name
        return path
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (or_pipe and stat.S_ISFIFO(mode)):
        return path
    raise UserError(f"{path} is a device or a pipe: use a regular file")


def read_bytes(path: Path) -> bytes:
    """Read the bytes of a file; UserError with its name if it can't be read."""
    try:
        data = regular_file(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    _refuse_pointer(path, data[: len(POINTER)])
    return data


def check_whole(path: Path) -> Path:
    """Return a path that is about to be read; UserError as in `regular_file`, or for a pointer of
    Git LFS. A missing file is not an error here."""
    if regular_file(path).is_file():
        with suppress(OSError), open(path, "rb") as file:
            _refuse_pointer(path, file.read(len(POINTER)))
    return path


def _refuse_pointer(path: Path, start: bytes) -> None:
    """Raise UserError if a file begins like a pointer of Git LFS."""
    if start == POINTER:
        raise UserError(
            f"{path} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its "
            "directory, or download the model with `hf download`"
        )


def without_mark(text: bytes) -> bytes:
    """Return UTF-8 text without the byte-order mark that some editors write."""
    return text.removeprefix(codecs.BOM_UTF8)


def write_text(flag: str, path: Path, text: str) -> None:
    """Write the text file of a flag; UserError with the flag and the path if that fails."""
    try:
        with open(path, "w", opener=open_at_once) as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{flag} {path}: {reason_of(error)}", exit_code=1) from error


def open_at_once(path: str | Path, flags: int) -> int:
    """Open a file for writing: an opener for `open`. A pipe without a reader raises OSError; it
    does not block."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


def reason_of(error: OSError) -> str:
    """Return why a file could not be read or written, with advice if the disk is full."""
    reason = error.strerror or str(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{reason}: make room on its disk" if full else reason


def convert(value: Any, kind: Any, name: str, **options: Any) -> Any:
    """Convert a value from a file to a type or dataclass.

    Args:
        value: the value.
        kind: the type.
        name: name of the value in errors.
        options: arguments of msgspec.convert.

    Raises:
        UserError: if a part of the value has another type, or is out of range.
    """
    try:
        return msgspec.convert(value, kind, **options)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `")
        place, in_key = re.subn(r"^key` in `", "", place)
        place = place.removeprefix("$").rstrip("`")
        for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", place):
            value = value[key] if key else value[int(index)]
        where = f"{name}{place}".removeprefix(".")
        if missing := re.fullmatch(r"Object missing required field `(.*)`", reason):
            raise UserError(f"{where} has no {missing[1]}".strip()) from None
        if in_key or "[...]" in place:  # of a dictionary: msgspec omits the key
            what = "key" if in_key else "value"
            raise UserError(f"{where} has a wrong {what}: {_rule(reason, kind)}") from None
        raise UserError(f"{where} is {brief(value)}: {_rule(reason, kind)}") from None
    except UnicodeEncodeError as error:
        raise UserError(f"{name or 'a text'} is not valid Unicode: {error}") from None


def brief(value: Any) -> str:
    """Return a short text for a value from a file, at most 60 characters long."""
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) >= 10**60:
        return "a huge number"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _rule(reason: str, kind: Any) -> str:
    """Return the expectation of msgspec in words: "it must be an int of at least 1"."""
    if reason.startswith("Invalid enum value"):
        choices = [choice for choice in _choices(kind) if choice is not None]
        if not choices:
            return "this value is not supported"
        return f"use one of {', '.join(map(str, choices))}"
    expected = re.match(r"Expected `([^`]*)`(.*?)(, got .*)?$", reason)
    if not expected:
        return reason.lower() if reason[:1].isupper() else reason
    names = [name for name in expected[1].split(" | ") if name != "null"]
    kinds = " or ".join(KINDS.get(name, name) for name in names)
    limit = expected[2].replace(" >= ", " of at least ").replace(" <= ", " of at most ")
    return f"it must be {kinds}{limit}"


def _choices(kind: Any) -> list:
    """Return the values of a Literal, also inside a union or with annotations."""
    parts = getattr(kind, "__args__", ())
    if not any(hasattr(part, "__args__") for part in parts):
        return [part for part in parts if not isinstance(part, type)]
    return [choice for part in parts for choice in _choices(part)]


def open_own(path: Path, *, create: bool = True, truncate: bool = False) -> BinaryIO:
    """Open a file that belongs to megazoo for reading and writing; UserError if the path is a link
    (it could point to any file), a directory or a pipe.

    create: create the file if it does not exist. truncate: empty it.
    """
    flags = os.O_RDWR | (os.O_CREAT if create else 0) | (os.O_TRUNC if truncate else 0)
    # Don't wait for the other end of a pipe.
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):  # on Linux and on BSD
            raise UserError(
                f"{path} is a symbolic link, and writing to it would overwrite another file: "
                "remove the link",
                exit_code=1,
            ) from error
        if error.errno in (errno.EISDIR, errno.ENXIO):  # a directory, or a socket
            raise UserError(f"{path} is not a file: remove it", exit_code=1) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path} is not a file: remove it", exit_code=1)
    return os.fdopen(descriptor, "r+b")


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """Open a file that belongs to megazoo, and hold its exclusive lock within this block. The
    system releases the lock if the process dies."""
    with open_own(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def in_threads(work: Callable[[int], Any], items: Iterable[int]) -> list:
    """Return the result of `work` for each item, four at a time: some files are computed while
    others are written."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(work, items))


@contextmanager
def malformed(path: Path) -> Iterator[None]:
    """Convert errors caused by wrong types or missing keys within this block to a UserError that
    names the file."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{path}: {error}") from error
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is malformed: {type(error).__name__} {error}") from error


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file atomically: on an error, a partial line is removed."""
    with open(path, "ab", buffering=0, opener=open_at_once) as file:
        before = os.fstat(file.fileno())
        try:
            written = file.write(line)
            if written < len(line):  # this write raises the error
                file.write(line[written:])
        except OSError:
            if stat.S_ISREG(before.st_mode):
                file.truncate(before.st_size)
            raise
