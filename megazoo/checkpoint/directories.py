"""Directories that are there whole or not at all: steps of a run, and what a tool writes."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megazoo.checkpoint.locks import output_lock
from megazoo.checkpoint.ownership import check_place, check_replaceable, is_of_run, remove
from megazoo.checkpoint.places import (
    LATEST,
    MANIFEST,
    PARTIAL,
    REPLACED,
    asides,
    hidden_directories,
    step_name,
)
from megazoo.checkpoint.tensor_files import crc32_of
from megazoo.checkpoint.writing import write_atomically
from megazoo.errors import UserError


@contextmanager
def new_step(directory: Path, step: int, keep_last: int = 0, run: Any = None) -> Iterator[Path]:
    """Give a hidden directory in which to write a step. When the block ends well, the step gets its
    name, in place of an older one, and `latest` names it; else what was written is removed. The
    run's lock is held meanwhile.

    keep_last: how many steps of the run, the last written ones, remain; 0: all. run: its id.
    """
    directory.mkdir(parents=True, exist_ok=True)
    final = directory / step_name(step)
    check_place(final)
    if (directory / LATEST).is_dir():
        raise UserError(
            f"{directory / LATEST} is a directory: it is to name the last step; move it"
        )

    def name_of(path: Path) -> Path:
        return directory / path.name.split(".")[1]

    left = _tidied(hidden_directories(directory, r"step_[0-9]+"), name_of)
    with _staging(final) as staging:
        yield staging
        with _replaced(staging, final) as old:
            write_atomically(directory / LATEST, f"{final.name}\n".encode())
            sync_directory(directory)
    with _after_saving(final):
        for path in (*left, *old):
            remove(path, heir=name_of(path))
        for path in _too_old(final, keep_last, run):
            _remove_step(path)


@contextmanager
def new_directory(
    directory: Path, overwrite: bool = False, source: Path | None = None
) -> Iterator[Path]:
    """Give a new directory in which a tool writes. When the block ends well, it takes the place of
    `directory`; else it is removed. See `check_replaceable`."""
    try:
        with output_directory(
            directory, lambda: check_replaceable(directory, overwrite, source)
        ) as staging:
            yield staging
    except OSError as error:
        raise UserError(
            f"can't write {directory}: {error.strerror or error}", exit_code=1
        ) from error


@contextmanager
def output_directory(directory: Path, check: Callable[[], None]) -> Iterator[Path]:
    """Give a new directory, as `new_directory` does.

    check: raises UserError if the directory may not be replaced; it is called before anything is
    made, and again under the lock.
    """
    if directory.name in ("", ".."):
        directory = directory.resolve()
    check_place(directory)
    check()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with output_lock(directory):
        left = _tidied(asides(directory), lambda _: directory)
        check()
        with _staging(directory) as staging:
            yield staging
            with _replaced(staging, directory) as old:
                sync_directory(directory.parent)
        with _after_saving(directory):
            for path in (*left, *old):
                remove(path, heir=directory)


def stamp(file: Path) -> tuple[int, int, int]:
    """Return what changes when another program writes a file, or puts another in its place."""
    now = file.stat()
    return now.st_size, now.st_ino, now.st_mtime_ns


def check_unchanged(file: Path, before: tuple[int, int, int], info: dict) -> None:
    """Raise UserError if a file is not what it was when it had been written.

    before: its stamp then. info: its {"size", "crc32"}, which decide where the stamp is another: on
    some file systems of networks a file's time and number change by themselves.
    """
    try:
        now = stamp(file)
        same = now == before or (now[0] == info["size"] and crc32_of(file) == info["crc32"])
    except FileNotFoundError:
        same = False
    if not same:
        raise _changed_meanwhile(file)


def check_names(directory: Path, names: set[str]) -> None:
    """Raise UserError if a directory has more files than those that were written there.

    What is missing shows on the rank that wrote it; on a network's file system others may not see
    its files yet.
    """
    for name in sorted(set(os.listdir(directory)) - names):
        raise _changed_meanwhile(directory / name)


def _changed_meanwhile(file: Path) -> UserError:
    return UserError(f"{file} was changed by another program while it was written", exit_code=1)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden(final: Path, kind: str) -> Path:
    """Return a new name beside a directory: no other program takes the same."""
    return final.parent / f".{final.name}.{secrets.token_hex(4)}.{kind}"


@contextmanager
def _staging(final: Path):
    """Make the hidden directory in which `final` is written; remove it, if it is still there, when
    the block fails."""
    staging = _hidden(final, PARTIAL)
    staging.mkdir()
    try:
        yield staging
    except BaseException:
        with suppress(OSError):  # what failed first is what is told
            remove(staging)
        raise


@contextmanager
def _replaced(staging: Path, final: Path):
    """Rename a whole directory to its name. The block gets a list of the older one, if there is
    one, which is now aside; if the block fails, it gets its name again."""
    old = [_hidden(final, REPLACED)] if final.exists() else []
    sync_directory(staging)
    try:
        for aside in old:
            os.rename(final, aside)
        os.rename(staging, final)
        yield old
    except BaseException:
        with suppress(OSError):
            if not staging.exists():
                os.rename(final, staging)
            for aside in old:
                if aside.exists():
                    os.rename(aside, final)
        raise


def _tidied(left: list[Path], name_of: Callable[[Path], Path]) -> list[Path]:
    """Clean up after programs that were killed: what they had put aside gets its name again, what
    they had not finished is removed. Returns the rest: whole, and not to go before there is a newer
    one. name_of: gives the name that a hidden directory had, or was to get.
    """
    whole = []
    for path in left:
        final = name_of(path)
        if path.suffix == f".{REPLACED}" and not os.path.lexists(final):
            os.rename(path, final)
        elif (path / MANIFEST).is_file():
            whole.append(path)
        else:
            remove(path, heir=final)
    return whole


def _too_old(last: Path, keep: int, run) -> list[Path]:
    """Return the steps of a run that are not among the last `keep`, `last` included; of keep 0
    none."""
    if not keep:
        return []
    steps = [path for path in last.parent.iterdir() if path != last and is_of_run(path, run)]
    steps.sort(key=lambda step: ((step / MANIFEST).stat().st_mtime_ns, step))
    return steps[: max(0, len(steps) + 1 - keep)]


def _remove_step(step: Path) -> None:
    """Remove what megazoo wrote in a step. It is hidden first: if the program is killed meanwhile,
    the next save removes the rest."""
    aside = _hidden(step, PARTIAL)
    os.rename(step, aside)
    if remove(aside):
        os.rename(aside, step)  # with the files of others


@contextmanager
def _after_saving(final: Path):
    """Say of a failure within that the new directory is there all the same."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{final} is whole, but {error.filename or 'what it replaces'} can't be removed: "
            f"{error.strerror or error}",
            exit_code=1,
        ) from error
