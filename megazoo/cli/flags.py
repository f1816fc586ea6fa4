"""Fill dataclasses from a command line, with errors in one line. Also: types of flags that several
programs use."""

import ast
import contextlib
import inspect
import io
import re
import textwrap
from dataclasses import MISSING, Field, fields, is_dataclass, make_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro
from tyro.conf import Positional

from megazoo.cli.commands import command_line, program_name
from megazoo.cli.elsewhere import PLACEHOLDER, about_unknown, hints_for_unknown, translated
from megazoo.environment import world_size
from megazoo.errors import UserError, nearest
from megazoo.families.table import PRESETS
from megazoo.files import brief, convert


def unset(metavar: str, default: str = "") -> Any:
    """Return the help format of an optional flag. default: text that describes its default."""
    hint = f"(default: {default})" if default else ""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)


def mandatory(metavar: str) -> Any:
    """Return the help format of a required argument. The program checks that it is given."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="(required)")


SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
# Settings that are None until `cli.defaults` sets them, before a run reads them.
T = TypeVar("T")
if TYPE_CHECKING:
    Filled = Annotated[T, "filled in"]
else:
    Filled = T | None
TO_FILL: Any = None

Name = Annotated[str | None, unset("NAME")]
Text = Annotated[str | None, unset("TEXT", "none")]
File = Annotated[Path | None, unset("PATH", "none")]
Source = Positional[Annotated[Path | None, mandatory("SOURCE")]]


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
    _check_integers(options)
    return options


def flag_of(argument: str) -> str:
    """Return the flag for the name of a setting or a word of a command line: --log-interval for
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


def kinds_of(kind: type) -> dict:
    """Return the name and type of every setting of a dataclass, those of its groups included."""
    kinds, hints = {}, get_type_hints(kind, include_extras=True)
    for f in fields(kind):
        if group := _group_of(f):
            kinds |= kinds_of(group)
        else:
            kinds[f.name.rstrip("_")] = hints[f.name]
    return kinds


def _group_of(field: Field) -> type | None:
    """Return the dataclass of a group of settings; None for a single setting."""
    made: Any = field.default_factory
    return made if is_dataclass(made) else None


def typed_settings(kind: type, settings: dict, origin: str, *, words: bool = False) -> dict:
    """Convert the settings of a file to the types of their fields.

    The settings are never parsed as a command line, so text in a file cannot act as a flag. As on a
    command line, a single value is accepted for a list, and a number in a list of texts.

    Args:
        kind: Dataclass of the settings.
        settings: Values, with their names as keys.
        origin: Name of the file, for errors.
        words: Whether a text may also stand for a number.

    Raises:
        UserError: A setting is unknown or has the wrong type.
    """
    kinds = kinds_of(kind)
    try:
        for name in settings.keys() - kinds.keys():
            raise UserError(f"unknown setting {brief(name)}{nearest(name, kinds)}")
        return {name: _typed(name, value, kinds[name], words) for name, value in settings.items()}
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None


def with_settings(options, settings: dict):
    """Return a copy of a dataclass of settings (possibly with groups) with these typed settings."""
    values = {}
    for f in fields(options):
        value = getattr(options, f.name)
        if is_dataclass(value):
            values[f.name] = with_settings(value, settings)
        elif f.name.rstrip("_") in settings:
            values[f.name] = settings[f.name.rstrip("_")]
    return replace(options, **values)


def _typed(name: str, value, kind, words: bool):
    several = get_origin(kind) is tuple
    if several and not isinstance(value, list | tuple):
        value = [value]
    for word in value if several else [value]:
        _check_integer(name, word)
    if several and str in get_args(kind):
        value = [str(v) if type(v) in (int, float) else v for v in value]
    values = value if several else [value]
    for word in values:
        if isinstance(word, str):
            check_text(name, word)
            _check_empty(name, word, kind)
    value = _spelled_out(value, kind)
    if words and not _takes_text(kind):
        value = [_number_in(v) for v in values] if several else _number_in(value)
    return convert(value, kind, name, dec_hook=_as_path)


def _takes_text(kind) -> bool:
    return kind in (str, Path) or isinstance(kind, str) or any(map(_takes_text, get_args(kind)))


def _number_in(value):
    """Return the number in a text; other values are returned unchanged."""
    for kind in (int, float) if isinstance(value, str) else ():
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


def _as_path(kind: type, value) -> Path:
    if not issubclass(kind, Path) or not isinstance(value, str):
        raise ValueError("it must be a path")
    return Path(value)


def check_text(name: str, text: str) -> None:
    """Raise UserError for text that is not valid in file names and terminal output. name: setting
    of the text, for the error."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{name} is {brief(text)}: it must be text in UTF-8, without NUL")


def _check_empty(name: str, text: str, kind) -> None:
    """Raise UserError for an empty path or name: an empty path means the current directory."""
    is_name = any(getattr(hint, "metavar", "") == "NAME" for hint in get_args(kind)[1:])
    if not text and (is_name or get_origin(kind) is tuple or _is_path(kind)):
        raise UserError(f"{name} is empty: pass {'a name' if is_name else 'a directory or file'}")


def _is_path(kind) -> bool:
    return kind is Path or any(map(_is_path, get_args(kind)))


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
                _check_empty(name, value, kind)
        elif name and (values == 0 or get_origin(kind) is tuple) and kind is not bool:
            _check_empty(name, argument, kind)
            values += 1
        else:
            _check_empty("an argument", argument, Path)


def _check_integers(options) -> None:
    """Raise UserError for integers of 2**63 and more."""
    for f in fields(options):
        value = getattr(options, f.name)
        if is_dataclass(value):
            _check_integers(value)
        else:
            _check_integer(flag_of(f.name), value)


def _check_integer(name: str, value) -> None:
    if isinstance(value, int) and abs(value) >= 2**63:
        raise UserError(f"{name} is {brief(value)}: it must be below 2**63")


def _give_help(kind: type) -> None:
    """Use the docstring under each field of a dataclass, groups included, as the help of its flag.

    tyro would also find the docstrings, but show every line as a separate paragraph.
    """
    for part in filter(inspect.get_annotations, kind.__mro__):
        for name, text in _own_texts(part).items():
            described = Annotated[part.__annotations__[name], _help(text)]
            part.__annotations__[name] = described
    for f in fields(kind):
        if group := _group_of(f):
            _give_help(group)


def texts_of(kind: type) -> dict[str, str]:
    """Return the docstrings under the fields of a dataclass, in their order."""
    texts = {}
    for part in filter(inspect.get_annotations, reversed(kind.__mro__)):
        texts |= _own_texts(part)
    return texts


def _own_texts(kind: type) -> dict[str, str]:
    """Return the docstrings under the fields of a dataclass, without those of its base classes."""
    parsed: Any = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    texts: dict[str, Any] = {}
    for setting, below in pairwise(parsed.body[0].body):
        documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(setting, ast.AnnAssign) and documented:
            text = below.value.value.replace("{families}", ", ".join(PRESETS))
            texts[ast.unparse(setting.target)] = text
    return texts


def _help(text: str) -> Any:
    return tyro.conf.arg(help=" ".join(text.split()))


def _only(kind: type, names: tuple[str, ...]) -> type:
    """Return a dataclass with only these settings of `kind` and of its groups. Their help is the
    first paragraph of their docstrings."""
    texts, groups = {}, [group for f in fields(kind) if (group := _group_of(f))]
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
    topics = ", ".join(f.name for f in fields(kind) if _group_of(f))
    return f"--help-all describes all {len(settings_of(kind))} options, by topic:\n{topics}.\n"


def _with_values(arguments: list[str], kinds: dict) -> list[str]:
    """Write --x and --no-x of an optional switch as --x True and --x False, and short names of
    dtypes in full."""
    words, name = [], ""
    for argument, following in pairwise([*arguments, ""]):
        flag = flag_of(argument) if argument.startswith("--") else ""
        if not flag:
            words.append(_spelled_out(argument, kinds.get(name)))
            name = ""  # a dtype is a single word
            continue
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        given, equals, value = argument.partition("=")
        words.append(given + equals + _spelled_out(value, kinds.get(name)))
        name = "" if equals else name
        if get_args(kinds.get(name))[:1] == (bool | None,) and "=" not in argument:
            if flag.startswith("--no-"):
                words[-1:] = [flag.replace("--no-", "--", 1), "False"]
            elif following not in ("True", "False"):
                words.append("True")
    return words


def _spelled_out(value, kind):
    """Return the full name of a dtype for a short one, if the type of the setting has dtypes."""
    names = choices_of(kind)
    full = SHORT_DTYPES.get(value) if isinstance(value, str) else None
    return full if full and full in names and value not in names else value


def choices_of(kind) -> tuple:
    """Return the valid values of a type with literals; () for other types."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return sum(map(choices_of, get_args(kind)), ())


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
