"""Finds the files that megazoo wrote in a directory, and removes only those."""

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from megazoo.checkpoint.places import (
    CONFIG,
    DCP_METADATA,
    INDEX,
    LATEST,
    MANIFEST,
    TRAINER,
    is_complete,
    is_step_name,
)
from megazoo.checkpoint.writing import METADATA
from megazoo.errors import UserError
from megazoo.sidecars import SIDECAR_FILES, TEMPLATE_FILE, TEMPLATE_FOLDER, is_sidecar

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's
WEIGHTS = re.compile(
    r"(model|optimizer)(_tp_\d+(_[a-z]{1,16}_\d+)?_pp_\d+(_dp_\d+)?|-\d+-of-\d+)?\.safetensors"
)
DCP_DATA = re.compile(r"__\d+_[01]\.distcp")
SMALL_FILES = (MANIFEST, DCP_METADATA, TRAINER, CONFIG, INDEX, ADAPTER_CONFIG)
HEADER = b'{"__metadata__":' + json.dumps(METADATA, separators=(",", ":")).encode()
DCP_HEADER = b"written by megazoo".ljust(64, b"\0")  # of a file of chunks, before the first one


def remove(directory: Path, heir: Path | None = None) -> bool:
    """Remove the files that megazoo wrote in a directory, and the directory if it is then empty.

    The manifest is removed first, so that a partly removed directory never seems complete.

    Args:
        directory: the directory; it may be missing.
        heir: the directory that replaced it, to which other files are moved.

    Returns:
        Whether the directory remains, with files that megazoo did not write.
    """
    if directory.is_symlink() or not directory.is_dir():
        return False
    for manifest in (MANIFEST, DCP_METADATA):
        (directory / manifest).unlink(missing_ok=True)
    foreign = []
    for name in _names_in(directory):
        if _is_our_name(name) and _is_file(directory / name):
            (directory / name).unlink()
        elif heir and (heir / name).parent.is_dir() and not os.path.lexists(heir / name):
            os.rename(directory / name, heir / name)
        else:
            foreign.append(name)
    if _is_folder(directory / TEMPLATE_FOLDER) and not os.listdir(directory / TEMPLATE_FOLDER):
        (directory / TEMPLATE_FOLDER).rmdir()
    if not foreign:
        try:
            directory.rmdir()
        except OSError as error:
            # On NFS a removed file keeps a name as long as a process has it open.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    return bool(foreign)


def is_of_run(step: Path, run: Any) -> bool:
    """Return whether a directory is a complete step of the run with this id, and not a link."""
    if step.is_symlink() or not is_step_name(step.name) or not is_complete(step):
        return False
    try:
        return json.loads((step / TRAINER).read_bytes()).get("run") == run
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def check_place(path: Path) -> None:
    """Raise UserError if no directory can be written at this path: it is a symbolic link or a file,
    or is below a file."""
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link: pass the path that it points to")
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise UserError(f"{there} is not a directory")


def check_replaceable(directory: Path, overwrite: bool = False, source: Path | None = None) -> None:
    """Raise UserError unless a new directory may replace this one.

    It may if the directory is missing or empty, or if it may be overwritten and holds only files
    that megazoo wrote. source: the input, which is never overwritten.
    """
    if source:
        _check_apart(directory, source)
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise UserError(f"{directory} is not empty: choose another, or pass --overwrite")
    if name := foreign_entry(directory):
        if name == LATEST or is_step_name(name):
            raise UserError(
                f"{directory} holds {name}, so it is the directory of a run: choose another"
            )
        raise UserError(
            f"{directory} holds {name}, which megazoo did not write: move it, or choose another "
            "directory"
        )


def foreign_entry(directory: Path) -> str | None:
    """Return the first name in a directory that does not belong to the checkpoint, Hugging Face
    model or adapter that megazoo wrote there; None if all belong to it."""
    names = _names_in(directory)
    ours = _files_of_checkpoint(directory) or _files_of_export(directory, names)
    return _first_but(ours or _files_of_adapter(directory), directory, names)


def foreign_to_adapter(directory: Path) -> str | None:
    """Return the first name in a directory that does not belong to the adapter that megazoo wrote
    there; None if all belong to it."""
    return _first_but(_files_of_adapter(directory), directory, _names_in(directory))


def _names_in(directory: Path) -> list[str]:
    """Return the names in a directory. The folder of chat templates is replaced by its files."""
    names = sorted(os.listdir(directory)) if directory.is_dir() else []
    if TEMPLATE_FOLDER in names and _is_folder(directory / TEMPLATE_FOLDER):
        names.remove(TEMPLATE_FOLDER)
        inside = sorted(os.listdir(directory / TEMPLATE_FOLDER))
        names += [f"{TEMPLATE_FOLDER}/{name}" for name in inside]
    return names


def _is_folder(path: Path) -> bool:
    """Return whether a path is a directory, and not a link."""
    return path.is_dir() and not path.is_symlink()


def _first_but(ours: set[str], directory: Path, names: list[str]) -> str | None:
    """Return the first of the names that is not in `ours`, or is not a regular file."""
    foreign = (name for name in names if name not in ours or not _is_file(directory / name))
    return next(foreign, None)


def _check_apart(output: Path, source: Path) -> None:
    """Raise UserError if the output is the input, contains it, or is inside it."""
    there, input_ = output.resolve(), source.resolve()
    if there == input_:
        raise UserError(f"{output} is also the input: choose another output")
    if there in input_.parents:
        raise UserError(f"{output} contains the input, {source}: choose another output")
    if input_ in there.parents:
        raise UserError(f"{output} is inside the input, {source}: choose another output")


def _is_file(path: Path) -> bool:
    """Return whether a path is a regular file, and not a link."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _is_our_name(name: str) -> bool:
    """Return whether megazoo uses this name for its files, or for files that it is writing."""
    small = re.fullmatch(r"(.*/)?\.(.*)\.partial", name)
    name = (small[1] or "") + small[2] if small else name
    fixed = name in (*SMALL_FILES, ADAPTER_WEIGHTS)
    return fixed or is_sidecar(name) or _holds_tensors(name)


def _holds_tensors(name: str) -> bool:
    return bool(WEIGHTS.fullmatch(name) or DCP_DATA.fullmatch(name))


def _files_of_checkpoint(directory: Path) -> set[str]:
    """Return the names of a checkpoint's files from its manifest; none if there is no manifest."""
    if not _is_file(directory / MANIFEST):
        return set()
    try:
        return {MANIFEST, *json.loads((directory / MANIFEST).read_bytes())["files"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _files_of_export(directory: Path, names: list[str]) -> set[str]:
    """Return the names of the files of a Hugging Face directory, or of a checkpoint of
    torch.distributed.checkpoint, that megazoo wrote; none if it wrote no weights there."""
    weights = {
        name
        for name in names
        if _holds_tensors(name) and _is_file(directory / name) and _is_signed(directory / name)
    }
    templates = filter(TEMPLATE_FILE.fullmatch, names)
    small = {CONFIG, INDEX, DCP_METADATA, *SIDECAR_FILES}
    return {*weights, *small, *templates} if weights else set()


def _files_of_adapter(directory: Path) -> set[str]:
    """Return the names of the files of an adapter that megazoo wrote; none if it wrote no weights
    there."""
    weights = directory / ADAPTER_WEIGHTS
    ours = _is_file(weights) and _is_signed(weights)
    return {ADAPTER_CONFIG, ADAPTER_WEIGHTS} if ours else set()


def _is_signed(file: Path) -> bool:
    """Return whether the header of a file with tensors names megazoo as its writer. That of a
    safetensors file follows the eight bytes of its length."""
    with open(file, "rb") as opened:
        start = opened.read(max(8 + len(HEADER), len(DCP_HEADER)))
    return start[8:].startswith(HEADER) or start.startswith(DCP_HEADER)
