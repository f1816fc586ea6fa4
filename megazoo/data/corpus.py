"""A corpus that exists on every machine: the source of the Python standard library (about 12 MB
of text)."""

import os
import sysconfig
from pathlib import Path

LEFT_OUT = {"test", "tests", "site-packages", "dist-packages"}


def standard_library() -> list[bytes]:
    """Return the standard library's source files, in UTF-8, sorted by path. Tests and installed
    packages are excluded."""
    return [path.read_bytes() for path in standard_library_files()]


def standard_library_files() -> list[Path]:
    """Return the paths of the files that `standard_library` reads."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), []
    for directory, folders, files in os.walk(root):
        folders[:] = [folder for folder in folders if folder not in LEFT_OUT]
        found += [Path(directory, file) for file in files if file.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
