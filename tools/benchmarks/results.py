"""Input and output of benchmark cases."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Setup:
    """The options of a measurement.

    Attributes:
        pairs: Runs of each side, alternating.
        gigabytes: Size of the checkpoints.
        directory: Directory for files.
        rows: Names of the rows of gpu_rows; none: all of them.
        tiny: Whether gpu_rows runs tiny models on the CPU.
    """

    pairs: int
    gigabytes: float
    directory: Path | None
    rows: tuple[str, ...] = ()
    tiny: bool = False


class Result(NamedTuple):
    """A comparison: the values of megazoo's runs and of the reference's runs, in `unit`.

    `memory` contains the peak memory of both in bytes, if it is measured.
    """

    name: str
    ours: list[float]
    reference: list[float]
    memory: tuple[int, ...] = ()
    unit: str = "s"

    @property
    def ratios(self) -> list[float]:
        """megazoo's value divided by the reference's, for each pair of runs."""
        return [a / b for a, b in zip(self.ours, self.reference, strict=True)]

    def row(self) -> str:
        """Return the medians as a row of a table."""
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
