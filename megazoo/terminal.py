"""What is shown on a terminal while work goes on."""

import sys

from megazoo.environment import is_rank_zero


def print_rank_0(*words, end: str = "\n") -> None:
    """Print on rank 0 alone, without delay."""
    if is_rank_zero():
        print(*words, end=end, flush=True)


def print_error(line: str) -> None:
    """Print a line on stderr, without delay."""
    print(line, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Return seconds as 1:05 or 2:03:04."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def byte_bar(total: int):
    """Return a progress bar for rank 0's terminal, with rate and time left: `with byte_bar(n) as
    bar: bar.update(bytes)`."""
    return _bar(total=total, unit="B", unit_scale=True)


def count_bar(total: int, unit: str):
    """Return a progress bar for rank 0's terminal, as `byte_bar` does, of things that are counted.
    unit: what one is called."""
    return _bar(total=total, unit=f" {unit}")


def _bar(**options):
    from tqdm import tqdm

    shown = sys.stderr.isatty() and is_rank_zero()
    return tqdm(**options, disable=not shown, leave=False)
