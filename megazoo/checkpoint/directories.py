"""Writes directories atomically: the steps of a run, and the outputs of tools."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megazoo.checkpoint.locks import output_lock
from megazoo.checkpoint.ownership import check_place, check_replaceable, is_of_run, remove
from megazoo.checkpoint.places import (
    COMPLETE,
    LATEST,
    PARTIAL,
    REPLACED,
    asides,
    hidden_directories,
    is_complete,
    step_name,
)
from megazoo.checkpoint.tensor_files import crc32_of
from megazoo.checkpoint.writing import write_atomically
from megazoo.errors import UserError


@contextmanager
def new_step(directory: Path, step: int, keep_last: int = 0, run: Any = None) -> Iterator[Path]:
    """Yield a hidden directory in which to write a step.

    If the block succeeds, the directory is renamed to the step's name, an older step of that name
    is removed, and `latest` names the step. If it fails, the hidden directory is removed. The
    caller holds the run's lock.

    keep_last: number of steps of the run to keep, the last written ones; 0 keeps all. run: id of
    the run.
    """
    directory.mkdir(parents=True, exist_ok=True)
    final = directory / step_name(step)
    check_place(final)
    if (directory / LATEST).is_dir():
        raise UserError(
            f"{directory / LATEST} is a directory, but must be a file that names the latest step: "
            "move it away"
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
    """Yield a new directory in which a tool writes. If the block succeeds, it replaces `directory`;
    otherwise it is removed. See `check_replaceable`."""
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
    """Yield a new directory that replaces `directory` if the block succeeds.

    check: raises UserError if the directory must not be replaced. It is called before anything is
    written, and again under the lock.
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
    """Return size, inode and time of a file. They change if another program writes or replaces the
    file."""
    now = file.stat()
    return now.st_size, now.st_ino, now.st_mtime_ns


def check_unchanged(file: Path, before: tuple[int, int, int], info: dict) -> None:
    """Raise UserError if a file has changed since it was written.

    before: its stamp after writing. info: its {"size", "crc32"}. They decide if the stamp differs:
    on some network file systems the time and inode of a file change by themselves.
    """
    try:
        now = stamp(file)
        same = now == before or (now[0] == info["size"] and crc32_of(file) == info["crc32"])
    except FileNotFoundError:
        same = False
    if not same:
        raise _changed_meanwhile(file)


def check_names(directory: Path, names: set[str]) -> None:
    """Raise UserError if a directory has other files than the given names.

    Missing files are not checked: the rank that wrote them checks them. On a network file system
    other ranks may not see them yet.
    """
    for name in sorted(set(os.listdir(directory)) - names):
        raise _changed_meanwhile(directory / name)


def _changed_meanwhile(file: Path) -> UserError:
    return UserError(f"{file} was changed by another program while it was written", exit_code=1)


def sync_directory(path: Path) -> None:
    """Wait until the file names in a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden(final: Path, kind: str) -> Path:
    """Return a unique hidden name in the parent of a directory."""
    return final.parent / f".{final.name}.{secrets.token_hex(4)}.{kind}"


@contextmanager
def _staging(final: Path):
    """Create the hidden directory in which `final` is written. If the block fails, remove it."""
    staging = _hidden(final, PARTIAL)
    staging.mkdir()
    try:
        yield staging
    except BaseException:
        with suppress(OSError):  # raise the first error, not this one
            remove(staging)
        raise


@contextmanager
def _replaced(staging: Path, final: Path):
    """Rename a complete directory to its final name.

    An existing directory of that name is renamed to a hidden name, which is yielded in a list. If
    the block fails, both renames are undone.
    """
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
    """Clean up after killed programs: restore replaced directories, remove incomplete ones.

    Returns the remaining hidden directories. They are complete, and must be kept until a newer one
    is written. name_of: returns the final path of a hidden directory.
    """
    whole = []
    for path in left:
        final = name_of(path)
        if path.suffix == f".{REPLACED}" and not os.path.lexists(final):
            os.rename(path, final)
        elif is_complete(path):
            whole.append(path)
        else:
            remove(path, heir=final)
    return whole


def _too_old(last: Path, keep: int, run) -> list[Path]:
    """Return the steps of a run except the last `keep` ones, which include `last`. keep 0 keeps
    all."""
    if not keep:
        return []
    steps = [path for path in last.parent.iterdir() if path != last and is_of_run(path, run)]
    steps.sort(key=lambda step: (_completed_at(step), step))
    return steps[: max(0, len(steps) + 1 - keep)]


def _completed_at(step: Path) -> int:
    last = next(file for name in COMPLETE if (file := step / name).is_file())
    return last.stat().st_mtime_ns


def _remove_step(step: Path) -> None:
    """Remove the files that megazoo wrote in a step. The step is renamed to a hidden name first, so
    that the next save removes the rest if the program is killed."""
    aside = _hidden(step, PARTIAL)
    os.rename(step, aside)
    if remove(aside):
        os.rename(aside, step)  # it has files that megazoo did not write


@contextmanager
def _after_saving(final: Path):
    """Raise an OSError of the block as a UserError that says the new directory is complete."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{final} is complete, but {error.filename or 'the directory that it replaces'} can't "
            f"be removed: {error.strerror or error}",
            exit_code=1,
        ) from error
