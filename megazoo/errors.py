"""What users are told in one line: errors, and advice on what can be done better."""

import math
import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any


class UserError(ValueError):
    """A mistake in what the user gave. Programs print its text as one line and end with
    `exit_code`.

    exit_code: 2 for what is found before any work starts (the default), 1 for what shows up during
    it.
    """

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code


class Advice(UserWarning):
    """Something that works, though not as the user may want it. Programs print its text as one line
    on stderr."""


def advise(text: str) -> None:
    """Warn with an Advice, as of the line outside of megazoo that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "megazoo":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, Advice, stacklevel=level)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the known name closest to `name`, or nothing."""
    matches = get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def check_number(
    name: str, value: Any, least: float, below: float = math.inf, *, whole: bool = False
) -> None:
    """Raise UserError unless a value is a number, from `least` to below `below`; NaN is none.

    whole: it must be a whole number.
    """
    kind: type = Integral if whole else Real
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UserError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}")
    if not value >= least:
        raise UserError(f"{name} {value} must be {least} or more")
    if not value < below:
        limit = "finite" if below == math.inf else f"below {below}"
        raise UserError(f"{name} {value} must be {limit}")
