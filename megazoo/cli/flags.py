"""Flags: a dataclass filled from a command line, mistakes told in one line; and the kinds of flags
that tools share."""

import contextlib
import io
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megazoo.errors import UserError, nearest


def optional(kind: type, metavar: str, default: str):
    """An option that may be left out, with what the help says of that."""
    hint = f"(default: {default})" if default else ""
    return Annotated[kind | None, tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)]


Name = optional(str, "NAME", "")
Text = optional(str, "TEXT", "none")
File = optional(Path, "PATH", "none")
Argument = tyro.conf.Positional[
    Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
]


def parse_flags(kind: type, arguments: list[str], description: str):
    """A dataclass filled from a command line by tyro; `kind` has a default for every flag.

    Prints the help and exits 0 on --help. Raises UserError with one line for an unknown flag,
    naming the nearest known one, or a value of the wrong type.
    """
    flags = {"--" + name.replace("_", "-") for name in settings_of(kind)} | {"--help"}
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        if (
            flag.startswith("--")
            and flag not in flags
            and flag.replace("--no-", "--", 1) not in flags
        ):
            raise UserError(f"unknown flag {flag}{nearest(flag, flags)} (--help lists all)")
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return tyro.cli(kind, args=arguments, description=description)
    except SystemExit as stop:
        if not stop.code:
            raise
        # A box: a title, rules of dashes, the message, a rule, and hints.
        lines = [line.strip("│| ") for line in told.getvalue().splitlines()[1:]]
        is_rule = [not line.strip("╭╮╰╯─-+") for line in lines]
        start = is_rule.index(False) if False in is_rule else 0
        end = is_rule.index(True, start) if True in is_rule[start:] else len(lines)
        raise UserError(" ".join(lines[start:end]) or "bad arguments") from None


def settings_of(kind: type) -> dict:
    """The name and default of every setting of a dataclass, groups opened."""
    settings = {}
    for f in fields(kind):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        settings |= (
            settings_of(type(default)) if is_dataclass(default) else {f.name.rstrip("_"): default}
        )
    return settings
