"""A gallery of known bugs of parallel training, used to test the check.

Each bug is a function that patches the program while a check runs. The files group the bugs by
topic: layers, dropout, sequences, engine, optimizer.
"""

import re

# These modules fill BUGS.
from megazoo.testing.gallery import (  # noqa: F401
    dropout,
    engine,
    experts,
    layers,
    optimizer,
    program,
    sequences,
    state,
)
from megazoo.testing.gallery.planting import BUGS, Bug
from megazoo.testing.gallery.table import Outcome, header, line_of, self_test

__all__ = ["BUGS", "Bug", "Outcome", "header", "line_of", "self_test"]


def _place(bug: Bug) -> tuple[int, str]:
    number = re.match(r"\d+", bug.number)
    return (int(number[0]) if number else 1000), bug.number


BUGS.sort(key=_place)  # bugs without a number come last
