"""The base class of outputs of metrics, and their registry. Nothing here imports torch, which
--help does not need."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from megazoo.errors import UserError
from megazoo.files import brief, reason_of
from megazoo.lazy import is_installed
from megazoo.settings import flag_of

OUTPUTS: dict[str, type["Output"]] = {}
Class = TypeVar("Class", bound=type["Output"])


class Output:
    """An output to which rank 0 of a run writes its metrics, if its flag is set.

    Subclasses are registered with `register_output`. The docstring of the class is the help of the
    flag.

    Attributes:
        metavar: Placeholder of the flag's value in help texts. FILE and DIR are paths, and their
            directory is checked before the run.
        package: Python package that the output needs, if any.
        megatron: Flags in Megatron-LM: see `megazoo.settings.Setting`.
        errors: Exceptions of `write` and `close` after which a run continues without the output.
        run_id: Name by which a resumed run continues this output, if `open` sets one: at most 200
            characters, without slashes. Checkpoints store it.
    """

    metavar: ClassVar[str] = "NAME"
    package: ClassVar[str] = ""
    megatron: ClassVar[str] = ""
    errors: ClassVar[type[Exception]] = Exception
    run_id: str | None = None

    @classmethod
    def kind(cls) -> type:
        """Return the type of the flag's value: str or Path."""
        return Path if cls.metavar in ("FILE", "DIR") else str

    def open(self, value: Any, *, run_id: str | None, settings: dict, step: int) -> None:
        """Open the output at the start of a run.

        Args:
            value: Value of the flag.
            run_id: `run_id` of the resumed run; None for a new run.
            settings: Settings of the run and the model, to show.
            step: Step at which the run starts. Metrics of later steps are of an earlier start.

        Raises:
            UserError: It can't be opened, and why. An OSError becomes one that names the flag.
        """

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write the metrics of a step, or of an evaluation after it.

        Args:
            step: Number of the step.
            values: Metrics by name. Names of an evaluation start with eval_ or test_. None: the
                metric has no value. Values may be dictionaries of lists.
        """
        raise NotImplementedError

    def close(self, failed: bool) -> None:
        """Close the output. failed: whether an error ended the run."""


def register_output(name: str) -> Callable[[Class], Class]:
    """Return a class decorator that registers an output.

    Args:
        name: Name of its flag, with underscores.

    Raises:
        UserError: The name is not lower-case letters, digits and underscores.
    """
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise UserError(
            f"the output {name!r} can't be a flag: use lower-case letters, digits and underscores"
        )

    def register(output: Class) -> Class:
        OUTPUTS[name] = output
        return output

    return register


def grouped(values: dict[str, Any]) -> dict[str, float]:
    """Return the numbers among metrics with their groups in their names: train/loss, eval/loss."""
    named = {}
    for key, value in values.items():
        is_evaluation = key.startswith(("eval_", "test_"))
        kind, name = (key[:4], key[5:]) if is_evaluation else ("train", key)
        if isinstance(value, int | float):
            named[f"{kind}/{name}"] = value
    return named


def check_output(name: str, value: Any) -> None:
    """Raise UserError if an output can't be written, before the run starts.

    name: of a registered output. value: of its flag.
    """
    output, flag = OUTPUTS[name], flag_of(name)
    if output.package and not is_installed(output.package):
        raise UserError(f"{flag} needs the package {output.package}: install it, or remove {flag}")
    if output.metavar == "FILE":
        check_writable(flag, value.parent)
        if value.is_dir():
            raise UserError(f"{flag} {value} is a directory: use the name of a file")
    elif output.metavar == "DIR":
        check_writable(flag, value)


def check_writable(flag: str, directory: Path) -> None:
    """Raise UserError if a directory cannot be created or written, before the run starts."""
    above = (directory, *directory.absolute().parents)
    try:
        existing = next(path for path in above if path.exists())
    except OSError as error:  # for example, the name is too long
        raise UserError(f"{flag} {brief(str(directory))}: {reason_of(error)}") from error
    if not existing.is_dir():
        raise UserError(f"{flag}: {existing} is not a directory")
    if not os.access(existing, os.W_OK):
        raise UserError(f"{flag}: no permission to write in {existing}")
