"""Curves: what was measured at each size, and the laws that it is expected to follow."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

POINT_COLUMNS = (
    "curve",
    "at",
    "seconds: median (range)",
    "rate",
    "peak memory",
    "planned",
    "a rank sends",
)
LAW_COLUMNS = ("curve", "of", "law", "fitted to", "last point", "law there", "departure")


class Law(NamedTuple):
    """What a quantity should be of a size: a sum of terms, each times a factor that is fitted.

    text: the law, as it is read. terms: a function of the size for each. first: how many points it
    is fitted to, from the smallest; 0: all but the last.
    """

    text: str
    terms: tuple[Callable[[float], float], ...]
    first: int = 0

    def count(self, points: int) -> int:
        """Return how many of so many points the law is fitted to."""
        return self.first or points - 1

    def fit(self, sizes: list[float], values: list[float]) -> Callable[[float], float]:
        """Return the law as a function of the size, fitted to the first points.

        The squares of relative errors are least, of all factors that are not below 0: no cost is. A
        point of value 0 has no relative error and is left out.
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
        """Return by what part of the law the last point is above it, or below it."""
        return values[-1] / self.fit(sizes, values)(sizes[-1]) - 1


@dataclass(frozen=True)
class Point:
    """What was measured at one size.

    seconds: of each run. amount: tokens, or megabytes, of a run. memory: the peak, in bytes.
    planned: what the planner says of it. sent: the bytes that a rank sends in a step, as planned.
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
    """Points of growing size, and the law of each quantity: "time", "memory", "sent"."""

    name: str
    points: list[Point]
    laws: dict[str, Law]
    unit: str = "tokens/s"

    def of(self, quantity: str) -> tuple[list[float], list[float]]:
        """Return the sizes, and a quantity at each."""
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
        """Return the laws, and what departs from them at the last point, as rows of a table."""
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
