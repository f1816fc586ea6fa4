"""What a case is given, and what it yields."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Setup:
    """How to measure.

    pairs: runs of each side, in turn. gigabytes: the size of checkpoints. directory: for files.
    """

    pairs: int
    gigabytes: float
    directory: Path | None


class Result(NamedTuple):
    """One comparison: what each run took or reached, ours and the reference's, in `unit`.

    memory: the peaks of both in bytes, where they are measured.
    """

    name: str
    ours: list[float]
    reference: list[float]
    memory: tuple[int, ...] = ()
    unit: str = "s"

    @property
    def ratios(self) -> list[float]:
        """Ours over the reference's, of each pair."""
        return [a / b for a, b in zip(self.ours, self.reference, strict=True)]

    def row(self) -> str:
        """Return the result as a row of a table, medians."""
        ratios, middle = self.ratios, statistics.median(self.ratios)
        ours, reference = statistics.median(self.ours), statistics.median(self.reference)
        peaks = [f"{peak / 1e6:,.0f} MB" if peak else "" for peak in self.memory] or [" ", " "]
        cells = [
            self.name,
            f"{ours:,.3g} {self.unit}",
            f"{reference:,.3g} {self.unit}",
            f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            *peaks,
        ]
        return f"| {' | '.join(cells)} |"
