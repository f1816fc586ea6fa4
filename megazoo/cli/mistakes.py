"""What a program says of an exception that has reached its end."""

import importlib.metadata
import platform
import sys
import traceback
from types import TracebackType

from megazoo.files import reason_of

# Files that --import has run: an error below one of them may well be its own.
user_files: list[str] = []

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory")  # what torch says of the CPU's
LONGEST_NAME = 200  # characters of a file's name that a line shows


def line_of(error: Exception) -> str | None:
    """Return one line for a mistake of the user's, or for what the machine lacks; None for what
    must be a bug in a program."""
    if isinstance(error, OSError):
        names = [name for name in (error.filename, error.filename2) if name is not None]
        return ": ".join([*map(_shown, names[:1]), reason_of(error)])
    if isinstance(error, UnicodeError):
        return f"a text can't be read or written: {error}"
    if isinstance(error, RecursionError):
        return f"something is nested too deeply: {error}"
    if type(error).__name__ == "OutOfMemoryError" or _is_of_memory(error):
        reason = str(error).strip().partition("\n")[0]
        return (
            f"out of memory{f' ({reason})' if reason else ''}: use smaller batches or sequences, "
            "--recompute full, or more ranks; `megazoo plan` prints what a layout needs"
        )
    return None


def is_of_network(error: Exception) -> bool:
    """Say whether it tells of a connection, of which the launcher and the other ranks tell more."""
    # This loads torch, which --help does not need.
    from megazoo.parallel.failure import is_of_communication

    return isinstance(error, ConnectionError | TimeoutError) or is_of_communication(error)


def tell_bug(error: Exception) -> None:
    """Print the traceback of what must be a bug; and under it what to report, or above it, if the
    exception came through a file of the user's, which."""
    if file := _user_file(error.__traceback__):
        print(f"the error came through {file}, which --import ran:", file=sys.stderr)
    traceback.print_exception(error)
    if not file:
        ours, torch = sys.modules["megazoo"].__version__, importlib.metadata.version("torch")
        print(
            "this is a bug in megazoo: please report it with the lines above (megazoo "
            f"{ours}, torch {torch}, python {platform.python_version()})",
            file=sys.stderr,
        )
    sys.stderr.flush()


def _user_file(trace: TracebackType | None) -> str | None:
    """Return the file, of those that --import ran, that an exception came through."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    return next((file for file in reversed(files) if file in user_files), None)


def _is_of_memory(error: Exception) -> bool:
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    return said or isinstance(error, MemoryError)


def _shown(name: str | bytes | int) -> str:
    """Return a file's name, the middle of a very long one left out."""
    name = name.decode(errors="backslashreplace") if isinstance(name, bytes) else str(name)
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}...{name[-half:]}"
