"""Directories that are there whole or not at all: steps of a run, and what a tool writes."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

from megazoo.checkpoint.places import LATEST, MANIFEST, step_name
from megazoo.checkpoint.writing import write_atomically
from megazoo.errors import UserError


def staging_path(directory: Path, step: int) -> Path:
    """Return where a step is written before it gets its name."""
    return directory / f".{step_name(step)}.partial"


def staging_directory(directory: Path, step: int) -> Path:
    """Make the empty hidden directory in which a step is written."""
    staging = staging_path(directory, step)
    directory.mkdir(parents=True, exist_ok=True)
    remove(staging)
    staging.mkdir()
    return staging


def publish(staging: Path, step: int, keep_last: int = 0) -> Path:
    """Give a whole step its name, in place of an older one of that name, and point `latest` at it.

    keep_last: how many steps, the last written ones, remain; 0: all.
    """
    directory, final = staging.parent, staging.parent / step_name(step)
    with replace_directory(staging, final):
        write_atomically(directory / LATEST, f"{final.name}\n".encode())
        sync_directory(directory)
    if keep_last:
        older = [file for file in directory.glob(f"step_*/{MANIFEST}") if file.parent != final]
        older.sort(key=lambda file: (file.stat().st_mtime_ns, file))
        for manifest in older[: max(0, len(older) + 1 - keep_last)]:
            remove(manifest.parent)
    return final


@contextmanager
def replace_directory(staging: Path, final: Path):
    """Rename a whole directory over an older one, which is kept aside until the block ends."""
    replaced = final.parent / f".{final.name}.replaced"
    remove(replaced)
    sync_directory(staging)
    if final.exists():
        os.rename(final, replaced)
    os.rename(staging, final)
    yield
    remove(replaced)


def check_replaceable(directory: Path, overwrite: bool = False) -> None:
    """Raise UserError unless a new directory may take this one's place: it is empty, or may be
    overwritten."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise UserError(f"{directory} is not empty: choose another, or --overwrite")


@contextmanager
def new_directory(directory: Path):
    """Give a new directory in which to write. When the block ends well, it takes the place of
    `directory`; else it is removed."""
    staging = directory.parent / f".{directory.name}.partial"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        remove(staging)
        staging.mkdir()
        yield staging
        with replace_directory(staging, directory):
            sync_directory(directory.parent)
    except OSError as error:
        remove(staging, ignore_errors=True)
        raise UserError(
            f"can't write {directory}: {error.strerror or error}", exit_code=1
        ) from error
    except BaseException:
        remove(staging, ignore_errors=True)
        raise


def remove(directory: Path, ignore_errors: bool = False) -> None:
    """Remove a step's directory, if it is there; its manifest goes first, so that what is left
    never looks whole."""
    if directory.exists():
        (directory / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
