"""What is shown on a terminal while work goes on."""

import sys

from megazoo.environment import is_rank_zero

LINE_SECONDS = 30.0  # between lines of progress in a log


def print_rank_0(*words, end: str = "\n") -> None:
    """Print on rank 0 alone, without delay."""
    if is_rank_zero():
        print(*words, end=end, flush=True)


def note_rank_0(line: str) -> None:
    """Print a line on stderr on rank 0 alone."""
    if is_rank_zero():
        print_error(line)


def print_error(line: str) -> None:
    """Print a line on stderr, without delay."""
    print(line, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Return seconds as 1:05 or 2:03:04."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def byte_bar(total: int, what: str):
    """Return the progress of rank 0 in bytes: `with byte_bar(n, "load") as bar: bar.update(bytes)`.

    On a terminal a bar shows what is done, the rate and the time left, from the second second on;
    otherwise a line every 30 seconds does. what: the work, a verb.
    """
    return _progress(total, what, unit="B", unit_scale=True)


def count_bar(total: int, what: str, unit: str):
    """Return the progress of rank 0 as `byte_bar` does, in things that are counted. unit: what one
    is called."""
    return _progress(total, what, unit=f" {unit}")


def _progress(total: int, what: str, **options):
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # without a thread that would outlive it

    class Lines(Bar):
        """Progress as lines of a log."""

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if msg is None and self.n:  # not at the start, nor where a bar would be cleared
                print_error(str(self))

    options |= {"total": total, "desc": what, "leave": False, "disable": not is_rank_zero()}
    if sys.stderr.isatty():
        return Bar(**options, delay=1)
    line = "{desc}: {percentage:.0f}% of {total_fmt}, {rate_fmt}, {remaining} left"
    return Lines(**options, mininterval=LINE_SECONDS, miniters=1, delay=1e-9, bar_format=line)
