"""Flags: fills a dataclass from a command line, with mistakes in one line; and the kinds of flags
that programs share."""

import ast
import contextlib
import inspect
import io
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro

from megazoo.errors import UserError, nearest


def optional(kind: type, metavar: str, default: str):
    """Return the kind of an option that may be left out. default: what the help says of that."""
    hint = f"(default: {default})" if default else ""
    return Annotated[kind | None, tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)]


Name = optional(str, "NAME", "")
Text = optional(str, "TEXT", "none")
File = optional(Path, "PATH", "none")
Argument = tyro.conf.Positional[
    Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
]


def parse_flags(kind: type, arguments: list[str], description: str):
    """Fill a dataclass from a command line by tyro; `kind` has a default for every flag.

    Prints the help and exits 0 on --help. Raises UserError with one line for an unknown flag,
    naming the nearest known one, or a value of the wrong type.
    """
    _check_names(arguments, {flag_of(name) for name in settings_of(kind)} | {"--help"})
    if {"--help", "-h"} & set(arguments):
        _give_help(kind)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(kind, args=arguments, description=description)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_message_in(printed.getvalue()) or "bad arguments") from None


def flag_of(argument: str) -> str:
    """Return the flag of a setting's name or of a word of a command line: --log-interval for
    log_interval and for --log_interval=1."""
    return "--" + argument.removeprefix("--").partition("=")[0].replace("_", "-")


def settings_of(kind: type) -> dict:
    """Return the name and default of every setting of a dataclass, those of its groups included."""
    settings = {}
    for f in fields(kind):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if is_dataclass(default):
            settings |= settings_of(type(default))
        else:
            settings[f.name.rstrip("_")] = default
    return settings


def _give_help(kind: type) -> None:
    """Make the docstring under each setting of a dataclass its help, groups included.

    tyro finds the docstrings by itself, but shows every line of one as a paragraph of its own.
    """
    for part in (part for part in kind.__mro__ if is_dataclass(part)):
        body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0].body
        for setting, below in pairwise(body):
            documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(setting, ast.AnnAssign) and documented:
                name, text = setting.target.id, " ".join(below.value.value.split())
                described = Annotated[part.__annotations__[name], tyro.conf.arg(help=text)]
                part.__annotations__[name] = described
    for f in fields(kind):
        if f.default_factory is not MISSING and is_dataclass(f.default_factory):
            _give_help(f.default_factory)


def _check_names(arguments: list[str], flags: set[str]) -> None:
    for argument in arguments:
        if not argument.startswith("--"):
            continue
        flag = flag_of(argument)
        if flag not in flags and flag.replace("--no-", "--", 1) not in flags:
            raise UserError(f"unknown flag {flag}{nearest(flag, flags)} (--help lists all)")


def _message_in(box: str) -> str:
    """The message in tyro's box: a title, rules of dashes, the message, a rule, and hints."""
    lines = [line.strip("│| ") for line in box.splitlines()[1:]]
    is_rule = [not line.strip("╭╮╰╯─-+") for line in lines]
    start = is_rule.index(False) if False in is_rule else 0
    end = is_rule.index(True, start) if True in is_rule[start:] else len(lines)
    return " ".join(lines[start:end])
