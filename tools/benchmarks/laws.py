"""Curves: measurements at each size, and the laws that they are expected to follow."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

POINT_COLUMNS = (
    "curve",
    "size",
    "seconds: median (range)",
    "rate",
    "peak memory",
    "planned memory",
    "planned bytes sent per rank",
)
LAW_COLUMNS = (
    "curve",
    "quantity",
    "law",
    "points of the fit",
    "last point",
    "prediction of the law",
    "difference",
)


class Law(NamedTuple):
    """An expected dependence on the size: a sum of terms with fitted factors.

    Attributes:
        text: The law as text.
        terms: Functions of the size.
        first: Number of points for the fit, smallest first; 0: all except the last.
    """

    text: str
    terms: tuple[Callable[[float], float], ...]
    first: int = 0

    def count(self, points: int) -> int:
        """Return the number of points for the fit."""
        return self.first or points - 1

    def fit(self, sizes: list[float], values: list[float]) -> Callable[[float], float]:
        """Fit the law to the first points and return it as a function of the size.

        The sum of squared relative errors is minimized. Factors are at least 0, because costs are
        not negative. Points with the value 0 are skipped, because they have no relative error.
        """
        count = self.count(len(sizes))
        pairs = [pair for pair in zip(sizes[:count], values[:count], strict=True) if pair[1]]
        relative = np.array([[term(size) / value for term in self.terms] for size, value in pairs])
        best, least = np.zeros(len(self.terms)), np.inf
        for kept in product((False, True), repeat=len(self.terms)):
            factors = np.zeros(len(self.terms))
            factors[list(kept)] = np.linalg.lstsq(relative[:, kept], np.ones(len(pairs)))[0]
            error = np.square(relative @ factors - 1).sum()
            if (factors >= 0).all() and error < least:
                best, least = factors, error
        terms = list(zip(best, self.terms, strict=True))
        return lambda size: float(sum(factor * term(size) for factor, term in terms))

    def departure(self, sizes: list[float], values: list[float]) -> float:
        """Return the relative difference of the last point from the law."""
        return values[-1] / self.fit(sizes, values)(sizes[-1]) - 1


@dataclass(frozen=True)
class Point:
    """Measurements at one size.

    Attributes:
        size: The size.
        seconds: Seconds per run.
        amount: Tokens or megabytes per run.
        memory: Peak memory in bytes.
        planned: Memory in bytes according to the planner.
        sent: Bytes that a rank sends per step, according to the planner.
    """

    size: float
    seconds: list[float]
    amount: float
    memory: int
    planned: int = 0
    sent: float = 0.0


QUANTITIES = {
    "time": lambda point: statistics.median(point.seconds),
    "memory": lambda point: point.memory / 1e6,
    "sent": lambda point: point.sent / 1e6,
}
UNITS = {"time": "s", "memory": "MB", "sent": "MB"}


@dataclass(frozen=True)
class Curve:
    """Points of increasing size, and the laws of the quantities "time", "memory" and "sent"."""

    name: str
    points: list[Point]
    laws: dict[str, Law]
    unit: str = "tokens/s"

    def of(self, quantity: str) -> tuple[list[float], list[float]]:
        """Return the sizes, and the values of a quantity."""
        return [p.size for p in self.points], list(map(QUANTITIES[quantity], self.points))

    def rows(self) -> list[str]:
        """Return the points as rows of a table."""
        return [_row(self.name, *self._cells(point)) for point in self.points]

    def _cells(self, point: Point) -> list[str]:
        middle = statistics.median(point.seconds)
        return [
            f"{point.size:,.4g}",
            f"{middle:.3g} ({min(point.seconds):.3g} to {max(point.seconds):.3g})",
            f"{point.amount / middle:,.0f} {self.unit}",
            f"{point.memory / 1e6:,.0f} MB",
            f"{point.planned / 1e6:,.0f} MB" if point.planned else " ",
            f"{point.sent / 1e6:,.2f} MB" if point.sent else " ",
        ]

    def law_rows(self) -> list[str]:
        """Return the laws, and the last point's differences from them, as rows of a table."""
        return [_row(self.name, *self._law_cells(quantity)) for quantity in self.laws]

    def _law_cells(self, quantity: str) -> list[str]:
        law, (sizes, values) = self.laws[quantity], self.of(quantity)
        unit = UNITS[quantity]
        return [
            quantity,
            law.text,
            f"the first {law.count(len(sizes))}",
            f"{values[-1]:,.3g} {unit}",
            f"{law.fit(sizes, values)(sizes[-1]):,.3g} {unit}",
            f"{law.departure(sizes, values):+.0%}",
        ]

    def as_dict(self) -> dict:
        """Return the curve as values for JSON."""
        laws = {
            quantity: {"law": law.text, "departure": law.departure(*self.of(quantity))}
            for quantity, law in self.laws.items()
        }
        points = [vars(point) for point in self.points]
        return {"name": self.name, "unit": self.unit, "points": points, "laws": laws}


def heading(columns: tuple[str, ...]) -> str:
    """Return the first two lines of a table."""
    return f"{_row(*columns)}\n{_row(*('---' for _ in columns))}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
