"""A gallery of known bugs of parallel training, used to test the check.

Each bug is a row that says which function of the program is replaced while a check runs. The files
group the bugs by topic: first the replacements that need more than a line, then the rows. Numbers
with N were published in 2026, those with P are of losses, those with Z of ZeRO-2 and 3.
"""

import re

# These modules fill BUGS.
from megazoo.testing.gallery import (  # noqa: F401
    dropout,
    engine,
    experts,
    layers,
    losses,
    optimizer,
    program,
    sequences,
    settings,
    state,
    sums,
    zero,
)
from megazoo.testing.gallery.planting import BUGS, Bug, named
from megazoo.testing.gallery.table import Outcome, header, line_of, self_test

__all__ = ["BUGS", "Bug", "Outcome", "header", "line_of", "named", "self_test"]


# Bugs without a number come between N and E.
SERIES = ["", "N", "no number", "E", "P", "Z"]


def _place(bug: Bug) -> tuple[int, int, str]:
    found = re.match(r"(N|E|P|Z|)(\d*)", bug.number)
    series, number = found.groups() if found else ("", "")
    return SERIES.index(series if number else "no number"), int(number or 0), bug.number


BUGS.sort(key=_place)
