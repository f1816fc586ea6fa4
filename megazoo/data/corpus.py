"""The corpus that every machine has: the source of the Python standard library, about 12 MB of
text."""

import sysconfig
from pathlib import Path

LEFT_OUT = {"test", "tests", "site-packages", "dist-packages"}


def standard_library() -> list[bytes]:
    """Return the standard library's source files, in UTF-8, in the order of their paths. Tests and
    installed packages are left out."""
    return [path.read_bytes() for path in standard_library_files()]


def standard_library_files() -> list[Path]:
    """Return the paths of what `standard_library` reads."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    chosen = sorted(path.as_posix() for path in paths if not LEFT_OUT.intersection(path.parts))
    return [root / path for path in chosen]
