"""Errors and warnings that programs print in one line."""

import math
import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any


class UserError(ValueError):
    """An error in the user's input. Programs print its message in one line and exit with
    `exit_code`.

    Args:
        message: the error message. Whitespace is collapsed to single spaces.
        exit_code: 2 (default) for errors found before any work starts, 1 for errors during work.
        details: lines that programs print below the message, indented.
    """

    def __init__(self, message: str, exit_code: int = 2, details: Iterable[str] = ()):
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code
        self.details = tuple(line.replace("\n", " ") for line in details)


class Advice(UserWarning):
    """A warning about something that works, but maybe not as intended. Programs print its message
    in one line on stderr."""


def advise(text: str) -> None:
    """Issue an Advice warning, attributed to the calling line outside megazoo."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "megazoo":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, Advice, stacklevel=level)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" with the known name closest to `name`, or an empty string."""
    matches = get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def any_of(choices: Iterable[Any]) -> str:
    """Return choices as text: "1, 2 or 4"."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def some_of(names: Iterable[str], shown: int = 5) -> str:
    """Return a text with the first few of the names."""
    known = sorted(names)
    first = ", ".join(known[:shown])
    return first if len(known) <= shown else f"{first} and {len(known) - shown} more"


def check_number(
    name: str, value: Any, least: float, below: float = math.inf, *, whole: bool = False
) -> None:
    """Raise UserError unless `value` is a number with least <= value < below. NaN raises UserError.

    Args:
        name: name of the value, for the message.
        value: the value.
        least: smallest valid number.
        below: upper limit, exclusive.
        whole: require an integer.
    """
    kind: type = Integral if whole else Real
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UserError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}")
    if not value >= least:
        raise UserError(f"{name} {value} must be {least} or more")
    if not value < below:
        limit = "finite" if below == math.inf else f"below {below}"
        raise UserError(f"{name} {value} must be {limit}")
