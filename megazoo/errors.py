"""The one exception that means: the user asked for something that can't be, and one line says what."""

from difflib import get_close_matches


class UserError(ValueError):
    """A mistake in what the user gave. Programs print its text as one line and end with `exit_code`.

    exit_code: 2 for what is found before any work starts (the default), 1 for what shows up during it.
    """

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code


def nearest(name: str, known) -> str:
    """The words "; did you mean X?" for the known name closest to `name`, or nothing."""
    matches = get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
