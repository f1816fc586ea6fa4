"""Messages for exceptions that end a program."""

import importlib.metadata
import platform
import sys
import traceback
from types import TracebackType

from megazoo.files import reason_of
from megazoo.user_files import user_files

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory")  # torch's messages for CPU memory
LONGEST_NAME = 200  # characters of a file name that are shown


def line_of(error: Exception) -> str | None:
    """Return one line for a user error or a missing resource; None for a bug in megazoo."""
    if isinstance(error, OSError):
        names = [name for name in (error.filename, error.filename2) if name is not None]
        return ": ".join([*map(_shown, names[:1]), reason_of(error)])
    if isinstance(error, UnicodeError):
        return f"text cannot be decoded or encoded: {error}"
    if isinstance(error, RecursionError):
        return f"a value or an expression is nested too deeply: {error}"
    if type(error).__name__ == "OutOfMemoryError" or _is_of_memory(error):
        reason = str(error).strip().partition("\n")[0]
        return (
            f"out of memory{f' ({reason})' if reason else ''}: use smaller batches or sequences, "
            "--recompute full, or more ranks; `megazoo plan` prints what a layout needs"
        )
    return None


def is_of_network(error: Exception) -> bool:
    """Return whether an error is a lost connection. The launcher and other ranks report more."""
    # This loads torch, which --help does not need.
    from megazoo.parallel.failure import is_of_communication

    return isinstance(error, ConnectionError | TimeoutError) or is_of_communication(error)


def tell_bug(error: Exception) -> None:
    """Print the traceback of a bug, and how to report it.

    If the exception passed through a file of --import, print the name of that file instead.
    """
    if file := _user_file(error.__traceback__):
        print(f"the error occurred in or below {file}, which --import ran:", file=sys.stderr)
    traceback.print_exception(error)
    if not file:
        version, torch = sys.modules["megazoo"].__version__, importlib.metadata.version("torch")
        print(
            "this is a bug in megazoo: please report it with the lines above (megazoo "
            f"{version}, torch {torch}, python {platform.python_version()})",
            file=sys.stderr,
        )
    sys.stderr.flush()


def _user_file(trace: TracebackType | None) -> str | None:
    """Return the last file of --import in a traceback; None without one."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    return next((file for file in reversed(files) if file in user_files), None)


def _is_of_memory(error: Exception) -> bool:
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    return said or isinstance(error, MemoryError)


def _shown(name: str | bytes | int) -> str:
    """Return the name of a file, shortened in the middle if it is very long."""
    name = name.decode(errors="backslashreplace") if isinstance(name, bytes) else str(name)
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}...{name[-half:]}"
