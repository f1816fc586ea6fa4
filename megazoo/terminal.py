"""Print messages and progress on the terminal."""

import sys

from megazoo.environment import is_rank_zero

LINE_SECONDS = 10.0  # between lines of progress in a log


def print_rank_0(*words, end: str = "\n") -> None:
    """Print only on rank 0, and flush."""
    if is_rank_zero():
        print(*words, end=end, flush=True)


def note_rank_0(line: str) -> None:
    """Print a line on stderr, only on rank 0."""
    if is_rank_zero():
        print_error(line)


def print_error(line: str) -> None:
    """Print a line on stderr, and flush."""
    print(line, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Format seconds as 1:05 or 2:03:04."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def byte_bar(total: int, what: str):
    """Return a progress bar in bytes for rank 0: `with byte_bar(n, "load") as bar: bar.update(k)`.

    It shows the progress, the rate and the remaining time: on a terminal as a bar after one second,
    otherwise as a line every 10 seconds.

    Args:
        total: total number of bytes.
        what: a verb for the work.
    """
    return _progress(total, what, unit="B", unit_scale=True)


def count_bar(total: int, what: str, unit: str, seconds: float | None = None):
    """Return a progress bar for rank 0 that counts items. See `byte_bar`.

    Args:
        total: total number of items.
        what: a verb for the work.
        unit: name of an item.
        seconds: minimum time between lines. None: LINE_SECONDS.
    """
    return _progress(total, what, seconds, unit=f" {unit}")


def _progress(total: int, what: str, seconds: float | None = None, **options):
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # disables the monitor thread, which would outlive it

    class Lines(Bar):
        """Progress as lines of a log."""

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if msg is None and self.n:  # not at the start or when a bar is cleared
                print_error(str(self))

    options |= {"total": total, "desc": what, "leave": False, "disable": not is_rank_zero()}
    if sys.stderr.isatty():
        return Bar(**options, delay=1)
    line = "{desc}: {percentage:.0f}% of {total_fmt}, {rate_fmt}, {remaining} left"
    seconds = LINE_SECONDS if seconds is None else seconds
    return Lines(**options, mininterval=seconds, miniters=1, delay=1e-9, bar_format=line)
