"""A gallery of published mistakes of parallel training, with which the check is checked.

Each is a function that plants it in the program while a check runs, in the file of what it is
about: layers, dropout, sequences, engine, optimizer.
"""

import re

# They fill BUGS.
from megazoo.testing.gallery import dropout, engine, layers, optimizer, sequences  # noqa: F401
from megazoo.testing.gallery.planting import BUGS, Bug
from megazoo.testing.gallery.table import Outcome, header, line_of, self_test

__all__ = ["BUGS", "Bug", "Outcome", "header", "line_of", "self_test"]


def _place(bug: Bug) -> tuple[int, str]:
    number = re.match(r"\d+", bug.number)
    return (int(number[0]) if number else 1000), bug.number


BUGS.sort(key=_place)  # those without a number last
