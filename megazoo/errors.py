"""What users are told in one line: errors, and advice on what can be done better."""

import sys
import warnings
from difflib import get_close_matches


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


def nearest(name: str, known) -> str:
    """Return "; did you mean X?" for the known name closest to `name`, or nothing."""
    matches = get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
