"""Fill dataclasses from a command line, with errors in one line. Also: types of flags that several
programs use."""

import contextlib
import inspect
import io
import re
from dataclasses import fields, make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import (
    Annotated,
    Any,
    get_args,
    get_origin,
)

import tyro

from megazoo.cli.elsewhere import PLACEHOLDER, about_unknown, hints_for_unknown, translated
from megazoo.commands import command_line, program_name
from megazoo.environment import world_size
from megazoo.errors import UserError
from megazoo.families.table import PRESETS
from megazoo.settings import (
    check_empty,
    check_integers,
    check_text,
    choices_of,
    flag_of,
    group_of,
    kinds_of,
    own_texts,
    settings_of,
    spelled_out,
    texts_of,
    with_settings,
)


def parse_flags(kind: type, arguments: list[str], description: str, settings: dict | None = None):
    """Fill a dataclass from a command line with tyro. On --help, print the help and exit with 0.

    If the dataclass has names in `FIRST`, --help describes only these settings, and --help-all
    describes all of them.

    Args:
        kind: Dataclass with a default for every flag.
        arguments: Words of the command line.
        description: Text above the flags in the help.
        settings: Result of `typed_settings`; the command line overrides them.

    Raises:
        UserError: A flag is unknown, or a value has the wrong type, is empty, is too large for an
            integer, or is not valid text. The message is one line.
    """
    first = getattr(kind, "FIRST", ())
    helps = ["--help", "--help-all"] if first else ["--help"]
    _check_names(arguments, kind, helps)
    _check_words(arguments, kinds_of(kind))
    topics, asked = "", {*helps, "-h"} & set(arguments)
    if asked:
        arguments = ["--help"]
        _give_help(kind)
        if first and "--help-all" not in asked:
            kind, topics = _only(kind, first), _topics_of(kind)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            default = with_settings(kind(), settings) if settings else None
            words = _with_values(arguments, kinds_of(kind))
            options = tyro.cli(
                kind, prog=program_name(), args=words, description=description, default=default
            )
    except SystemExit as stop:
        if not stop.code:
            print(topics, end="")
            raise
        message = _message_in(printed.getvalue()) or "bad arguments"
        raise UserError(_in_our_words(message, kinds_of(kind))) from None
    check_integers(options)
    return options


def _check_words(arguments: list[str], kinds: dict) -> None:
    """Raise UserError for words that are not valid text, and for empty paths or names."""
    name, values, kind = "", 0, None
    for argument in arguments:
        check_text("an argument" if argument.startswith("--") else name or "an argument", argument)
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            name, values = flag_of(name), 0
            kind = kinds.get(name.removeprefix("--").replace("-", "_"))
            if equals:
                check_empty(name, value, kind)
        elif name and (values == 0 or get_origin(kind) is tuple) and kind is not bool:
            check_empty(name, argument, kind)
            values += 1
        else:
            check_empty("an argument", argument, Path)


def _give_help(kind: type) -> None:
    """Use the docstring under each field of a dataclass, groups included, as the help of its flag.

    tyro would also find the docstrings, but show every line as a separate paragraph.
    """
    for part in filter(inspect.get_annotations, kind.__mro__):
        for name, text in own_texts(part).items():
            text = text.replace("{families}", ", ".join(PRESETS))
            described = Annotated[part.__annotations__[name], _help(text)]
            part.__annotations__[name] = described
    for f in fields(kind):
        if group := group_of(f):
            _give_help(group)


def _help(text: str) -> Any:
    return tyro.conf.arg(help=" ".join(text.split()))


def _only(kind: type, names: tuple[str, ...]) -> type:
    """Return a dataclass with only these settings of `kind` and of its groups. Their help is the
    first paragraph of their docstrings."""
    texts, groups = {}, [group for f in fields(kind) if (group := group_of(f))]
    for group in groups:
        texts |= texts_of(group)
    kinds, defaults = kinds_of(kind), settings_of(kind)
    first = {name: _help(texts[name].partition("\n\n")[0]) for name in names}
    return make_dataclass(
        kind.__name__,
        [(name, Annotated[kinds[name], first[name]], defaults[name]) for name in names],
    )


def _topics_of(kind: type) -> str:
    """Return a line about --help-all, with the names of the groups of a dataclass."""
    topics = ", ".join(f.name for f in fields(kind) if group_of(f))
    return f"--help-all describes all {len(settings_of(kind))} options, by topic:\n{topics}.\n"


def _with_values(arguments: list[str], kinds: dict) -> list[str]:
    """Write --x and --no-x of an optional switch as --x True and --x False, and short names of
    dtypes in full."""
    words, name = [], ""
    for argument, following in pairwise([*arguments, ""]):
        flag = flag_of(argument) if argument.startswith("--") else ""
        if not flag:
            words.append(spelled_out(argument, kinds.get(name)))
            name = ""  # a dtype is a single word
            continue
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        given, equals, value = argument.partition("=")
        words.append(given + equals + spelled_out(value, kinds.get(name)))
        name = "" if equals else name
        if get_args(kinds.get(name))[:1] == (bool | None,) and "=" not in argument:
            if flag.startswith("--no-"):
                words[-1:] = [flag.replace("--no-", "--", 1), "False"]
            elif following not in ("True", "False"):
                words.append("True")
    return words


def _check_names(arguments: list[str], kind: type, helps: list[str]) -> None:
    """Raise UserError for unknown flags. helps: flags that print help, the longest text last."""
    given = [flag_of(argument) for argument in arguments if argument.startswith("--")]
    known = {flag_of(name) for name in settings_of(kind)} | {*helps}
    unknown = [each for each in given if not {each, each.replace("--no-", "--", 1)} & known]
    unknown = list(dict.fromkeys(unknown))
    if len(unknown) == 1:
        raise UserError(f"{about_unknown('flag', unknown, known)} ({helps[-1]} lists all)")
    if unknown:
        raise UserError(
            f"{len(unknown)} unknown flags ({helps[-1]} lists all)",
            details=[*hints_for_unknown(unknown, known), *_finished(arguments, kind, known)],
        )


def _finished(arguments: list[str], kind: type, known: set[str]) -> list[str]:
    """Return lines with the command of a training run in which the flags of other libraries are
    replaced; none if its flags are not valid."""
    words = translated(arguments, known)
    if words is None or "--steps" not in known or {"--help", "--help-all", "-h"} & {*words}:
        return []
    try:
        options = parse_flags(kind, words, "")
    except UserError:
        return []
    lines = [f"use: {command_line(words)}"]
    if PLACEHOLDER in words:
        lines.append(f"{PLACEHOLDER}: a model with this architecture; `megazoo models` lists them.")
    if world_size() > 1 or options.parallel.tp * options.parallel.pp > 1:
        lines.append("On one machine, this command starts its ranks itself, without torchrun.")
    return lines


def _in_our_words(message: str, kinds: dict) -> str:
    """Return a message of tyro about a value in the format of `typed_settings`."""
    if found := re.match(r"Error parsing (--\S+): .*\b(int|float)\b.*'(.*)'", message, re.I):
        flag, kind, value = found.groups()
        meant = "an int" if kind.lower() == "int" else "a number"
        return f"{flag} is {value!r}: it must be {meant}"
    if found := re.match(r"invalid choice '(.*)' for argument '(--\S+)'", message):
        value, flag = found.groups()
        choices = choices_of(kinds[flag.removeprefix("--").replace("-", "_")]) or ("True", "False")
        return f"{flag} is {value!r}: use one of {', '.join(map(str, choices))}"
    if found := re.match(
        r"Error parsing (--\S+): Could not parse arguments (\[.*\]) into tuple", message
    ):
        flag, values = found.groups()
        return f"{flag} is {values}: all values must be whole numbers"
    if found := re.match(r"Unrecognized options: (.*)", message):
        return f"unexpected argument {found[1]}: it does not belong to a flag (see --help)"
    if found := re.match(r"Missing value for argument '(--\S+)'. Expected (\d+)", message):
        flag, count = found.groups()
        return f"{flag} needs {'a value' if count == '1' else count + ' values'}"
    return message


def _message_in(box: str) -> str:
    """Return the message in tyro's box: title, rule of dashes, message, rule, hints."""
    lines = [line.strip("│| ") for line in box.splitlines()[1:]]
    is_rule = [not line.strip("╭╮╰╯─-+") for line in lines]
    start = is_rule.index(False) if False in is_rule else 0
    end = is_rule.index(True, start) if True in is_rule[start:] else len(lines)
    return " ".join(lines[start:end])
