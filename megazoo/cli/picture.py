"""Pictures that commands draw with matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megazoo.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def import_pyplot() -> Any:
    """Return matplotlib.pyplot, without a window. UserError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("pictures need matplotlib: pip install matplotlib") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def check_picture(flag: str, path: Path) -> None:
    """Raise UserError if the name of a picture does not end in .png or .svg."""
    if path.suffix not in (".png", ".svg"):
        raise UserError(f"{flag} {path} must end in .png or .svg")


def save_picture(figure: "Figure", path: Path) -> None:
    """Write a figure to a file, and print its name. UserError if it can't be written."""
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"can't write {path}: {error.strerror}", exit_code=1) from error
    print(f"drew {path}")
