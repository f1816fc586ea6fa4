"""Settings as fields of dataclasses: the types of their values, and their conversion from files.

The docstring under a field is the help of its flag. A group of settings is a field whose default is
made by its dataclass. Nothing here imports torch, which --help does not need.
"""

import ast
import contextlib
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
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

from megazoo.errors import UserError, nearest
from megazoo.files import brief, convert


def unset(metavar: str, default: str = "") -> Any:
    """Return the help format of an optional flag. default: text that describes its default."""
    hint = f"(default: {default})" if default else ""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)


def mandatory(metavar: str) -> Any:
    """Return the help format of a required argument. The program checks that it is given."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="(required)")


@dataclass(frozen=True)
class Setting:
    """The declarations of a setting, in addition to its type, default and help.

    Rules, records, resumed runs, the agreement of ranks, settings files and translations read it.

    Attributes:
        least, most: Smallest and largest number. None: 10**12 for integers.
        below: Bound that a number must stay below.
        longest: Largest number of characters of a text.
        choices: Returns the valid values of a text.
        input: Whether it is a path of something that the run reads.
        output: Whether it names something that the run writes.
        result: Whether it changes what a run computes. An output never does.
        kept: Whether a checkpoint stores it for a resumed run.
        in_manifest: Whether the manifest of a checkpoint stores it.
        may_change: Whether a resumed run may have another value and still be the same run.
        samples: Whether it selects the samples or their order.
        agreed: Whether it must be the same on all ranks.
        follows: Whether its default follows from other settings.
        instead_of: Setting that it replaces.
        in_files: Whether it may be in a settings file.
        megatron, trainer, torchtitan: Names in Megatron-LM, the transformers Trainer and
            torchtitan, separated by semicolons. Words after a name are the value to write, or in
            brackets a difference in meaning.
    """

    least: float = 0
    most: float | None = None
    below: float = math.inf
    longest: int | None = None
    choices: Callable[[], Iterable[str]] | None = None
    input: bool = False
    output: bool = False
    result: bool = True
    kept: bool = False
    in_manifest: bool = False
    may_change: bool = False
    samples: bool = False
    agreed: bool = False
    follows: bool = False
    instead_of: str | None = None
    in_files: bool = True
    megatron: str = ""
    trainer: str = ""
    torchtitan: str = ""

    def __post_init__(self):
        if self.output:
            object.__setattr__(self, "result", False)  # the dataclass is frozen


class about:
    """Declares attributes of a `Setting`: in the annotation of a field, in the metadata of a field
    under "about", or for all fields of a group in its class attribute ABOUT."""

    def __init__(self, **values: Any):
        self.values = values


@cache
def described(kind: type) -> dict[str, Setting]:
    """Return what is declared about every setting of a dataclass, those of its groups included."""
    found: dict[str, Setting] = {}
    for f in fields(kind):
        if group := group_of(f):
            found |= described(group)
            continue
        values = dict(getattr(kind, "ABOUT", about()).values)
        for base in reversed(kind.__mro__):  # a field keeps what a base class declares of it
            values |= _declared_in(base, f.name)
        found[f.name.rstrip("_")] = setting = Setting(**values)
        if _is_path(get_type_hints(kind)[f.name]) and setting.input == setting.output:
            raise TypeError(f"{f.name} is a path: its type must be File or OutputFile")
    return found


def _declared_in(kind: type, name: str) -> dict[str, Any]:
    """Return the declarations of `about` in a class's own definition of a field."""
    own = inspect.get_annotations(kind).get(name)
    if own is None:
        return {}
    values = dict(kind.__dataclass_fields__[name].metadata.get("about", {}))
    for part in getattr(own, "__metadata__", ()):
        values |= part.values if isinstance(part, about) else {}
    return values


def check_value(setting: Setting, name: str, value: Any, origin: str = "") -> None:
    """Raise UserError if the value of a setting is out of its range. origin: the file it is in."""
    name = f"{origin}: {name}" if origin else flag_of(name)
    if setting.choices and value is not None and value not in setting.choices():
        raise UserError(f"{name} is {brief(value)}: use one of {', '.join(setting.choices())}")
    if setting.longest and value and len(value) > setting.longest:
        raise UserError(f"{name} has {len(value)} characters: use at most {setting.longest}")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if setting.least == 1 and value < 1:
        raise UserError(f"{name} {value} must be at least 1")
    if not math.isfinite(value) or value < setting.least:
        raise UserError(f"{name} {value} must be {setting.least:g} or more")
    if value >= setting.below:
        raise UserError(f"{name} {value} must be below {setting.below:g}")
    most = setting.most or (MOST if isinstance(value, int) else math.inf)
    if value > most:
        limit = f"{most:,}" if isinstance(most, int) else f"{most:g}"
        raise UserError(f"{name} {brief(value)} must be at most {limit}")


# Far above the needs of any run, and small enough that no value computed from them overflows.
MOST = 10**12
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


# Settings that are None until `trainer.defaults` sets them, before a run reads them.
T = TypeVar("T")


if TYPE_CHECKING:
    Filled = Annotated[T, "filled in"]
else:
    Filled = T | None


TO_FILL: Any = None


Name = Annotated[str | None, unset("NAME")]


Text = Annotated[str | None, unset("TEXT", "none")]


File = Annotated[Path | None, unset("PATH", "none"), about(input=True)]
OutputFile = Annotated[Path | None, unset("PATH", "none"), about(output=True)]


Source = Positional[Annotated[Path | None, mandatory("SOURCE")]]


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


@cache
def kinds_of(kind: type) -> dict:
    """Return the name and type of every setting of a dataclass, those of its groups included."""
    kinds, hints = {}, get_type_hints(kind, include_extras=True)
    for f in fields(kind):
        if group := group_of(f):
            kinds |= kinds_of(group)
        else:
            kinds[f.name.rstrip("_")] = _without_about(hints[f.name])
    return kinds


def _without_about(kind) -> Any:
    """Return a type without the declarations of `about` in its annotation."""
    if get_origin(kind) is not Annotated:
        return kind
    bare, *parts = get_args(kind)
    for part in parts:
        bare = bare if isinstance(part, about) else Annotated[bare, part]
    return bare


def group_of(field: Field) -> type | None:
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
            check_empty(name, word, kind)
    value = spelled_out(value, kind)
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


def check_empty(name: str, text: str, kind) -> None:
    """Raise UserError for an empty path or name: an empty path means the current directory."""
    is_name = any(getattr(hint, "metavar", "") == "NAME" for hint in get_args(kind)[1:])
    if not text and (is_name or get_origin(kind) is tuple or _is_path(kind)):
        raise UserError(f"{name} is empty: pass {'a name' if is_name else 'a directory or file'}")


def _is_path(kind) -> bool:
    return kind is Path or any(map(_is_path, get_args(kind)))


def check_integers(options) -> None:
    """Raise UserError for integers of 2**63 and more."""
    for f in fields(options):
        value = getattr(options, f.name)
        if is_dataclass(value):
            check_integers(value)
        else:
            _check_integer(flag_of(f.name), value)


def _check_integer(name: str, value) -> None:
    if isinstance(value, int) and abs(value) >= 2**63:
        raise UserError(f"{name} is {brief(value)}: it must be below 2**63")


def spelled_out(value, kind):
    """Return the full name of a dtype for a short one, if the type of the setting has dtypes."""
    names = choices_of(kind)
    full = SHORT_DTYPES.get(value) if isinstance(value, str) else None
    return full if full and full in names and value not in names else value


def choices_of(kind) -> tuple:
    """Return the valid values of a type with literals; () for other types."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return sum(map(choices_of, get_args(kind)), ())


def texts_of(kind: type) -> dict[str, str]:
    """Return the docstrings under the fields of a dataclass, in their order."""
    texts = {}
    for part in filter(inspect.get_annotations, reversed(kind.__mro__)):
        texts |= own_texts(part)
    return texts


@cache
def own_texts(kind: type) -> dict[str, str]:
    """Return the docstrings under the fields of a dataclass, without those of its base classes.

    A dictionary TEXTS of the class has functions that return the texts of further fields.
    """
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # made by a function
        source = "class Made: ..."
    parsed: Any = ast.parse(textwrap.dedent(source))
    texts: dict[str, Any] = {}
    for setting, below in pairwise(parsed.body[0].body):
        documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(setting, ast.AnnAssign) and documented:
            texts[ast.unparse(setting.target)] = below.value.value
    return texts | {name: text() for name, text in vars(kind).get("TEXTS", {}).items()}


def metavar_of(kind) -> str:
    """Return the placeholder of a value in help texts: {a,b} for literals, otherwise the type."""
    choices = choices_of(kind)
    return (
        f"{{{','.join(map(str, choices))}}}" if choices else _without_about(kind).__name__.upper()
    )
