"""Format tables, ranges and sizes as text."""

from collections.abc import Sequence


def without(rows: list[list[str]], *names: str) -> list[list[str]]:
    """Return the rows of a table without the named columns. The first row contains the names."""
    kept = [index for index, name in enumerate(rows[0]) if name not in names]
    return [[row[index] for index in kept] for row in rows]


def table(rows: list[list[str]], left: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table with cells aligned to the right.

    Args:
        rows: rows of cells.
        left: columns to align to the left instead.
    """
    columns = [list(column) for column in zip(*rows, strict=True)]
    to_left = {range(len(columns))[index] for index in left}
    for index, column in enumerate(columns):
        width = max(map(len, column))
        columns[index] = [c.ljust(width) if index in to_left else c.rjust(width) for c in column]
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def ranges(numbers: list[int]) -> str:
    """Format sorted numbers as ranges: 0-3,6 for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def size(count: float) -> str:
    """Format a number of bytes with four significant digits: 12.34GB."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 999.95 or unit == "TB":
            return f"{count:.4g}{unit}"
        count /= 1000
    raise AssertionError
