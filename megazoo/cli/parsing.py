"""Command line and TOML file of the training program, and arguments of tools that open a model."""

import os
import stat
import tomllib
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from megazoo.cli.elsewhere import about_unknown
from megazoo.cli.flags import parse_flags
from megazoo.cli.options import ImportOption
from megazoo.environment import world_size
from megazoo.errors import UserError
from megazoo.files import brief, regular_file
from megazoo.optim.learning_rate import LR_SCHEDULES, own_options
from megazoo.settings import (
    check_text,
    check_value,
    described,
    flag_of,
    settings_of,
    typed_settings,
    with_settings,
)
from megazoo.trainer.options import Options, parts_of, with_registered
from megazoo.trainer.rules import check_values
from megazoo.user_files import run_file

LARGEST_FILE = 1 << 20  # maximum size of a settings file in bytes


@dataclass
class CommandLine:
    """The settings of a start of the training program, from its command line and its --config file.

    The command line overrides the file.

    Attributes:
        words: words of the command line.
        parsed: settings of both, without derived defaults.
        file: settings of the TOML file.
        flags: names of the settings on the command line; no_x for --no-x.
    """

    words: list[str]
    parsed: Options
    file: dict
    flags: set[str]

    @classmethod
    def read(cls, words: list[str], description: str = "", kind: type = Options) -> "CommandLine":
        """Read a command line and its --config file, which may be a pipe.

        Args:
            words, description: see `parse_flags`.
            kind: `Options` or a subclass. The file of --import may register further settings.
        """
        words = _with_alias(words)
        name = _value_of("--config", words)
        file, is_pipe = _toml_in(name) if name else ({}, False)
        imported = _value_of("--import", words) or file.get("import")
        if imported and isinstance(imported, str):
            check_text("--import", imported)
            run_file(Path(imported))
        kind = with_registered(kind)
        _check_keys(kind, file, name or "")
        file = typed_settings(kind, file, name or "", words=True)
        flags = {flag_of(word)[2:].replace("-", "_") for word in words if word.startswith("--")}
        line = cls(words, kind(), file, flags)
        line.parsed = parse_flags(kind, words, description, line._below_flags({}))
        if is_pipe and line.parsed.parallel.replica * line.parsed.replicas > 1:
            raise UserError(f"--config {name} is a pipe, which only one rank can read: use a file")
        return line

    def options(self, resumed: dict | None = None, origin: str = "the checkpoint") -> Options:
        """Return the validated settings. For the arguments, see `merged`."""
        options = self.merged(resumed, origin)
        check_values(options)
        return options

    def merged(self, resumed: dict | None = None, origin: str = "the checkpoint") -> Options:
        """Return the settings of the user. Settings that depend on the model are None.

        Args:
            resumed: `settings_to_resume` of the resumed run. Settings of the user override them.
            origin: file of the resumed settings, for error messages.
        """
        kind = type(self.parsed)
        resumed, settings = typed_settings(kind, resumed or {}, origin), described(kind)
        resumed = self._without_stale(resumed)
        for name, value in resumed.items():
            check_value(settings[name], name, value, origin)
        below = self._below_flags(resumed)
        above = {name for name in below if {name, f"no_{name}"} & self.flags}
        options = with_settings(self.parsed, {n: below[n] for n in below.keys() - above})
        if options.data.mock_data:
            options.data.data = ("mock",)
        return options

    def _without_stale(self, resumed: dict) -> dict:
        """Drop the options of the resumed run's learning-rate schedule if the user selects another
        schedule."""
        name = self.parsed.optimizer.lr_schedule or self.file.get("lr_schedule")
        if name not in LR_SCHEDULES:
            return resumed
        stale = parts_of("optimizer").keys() - own_options(LR_SCHEDULES[name])
        return {key: value for key, value in resumed.items() if key not in stale}

    def _below_flags(self, resumed: dict) -> dict:
        """Return the settings of a checkpoint, overridden by those of the file.

        Settings are dropped if the user set a mutually exclusive one.
        """
        below = {**resumed, **self.file}
        settings = described(type(self.parsed))
        for usual, other in ((s.instead_of, name) for name, s in settings.items() if s.instead_of):
            pair = (usual, other)
            given = [name for name in pair if name in self.flags]
            given = given or [name for name in pair if self.file.get(name)]
            if len(given) > 1:
                raise UserError(
                    f"{flag_of(usual)} and {flag_of(other)} exclude each other: use one of them"
                )
            if given or below.get(other):  # settings of lower precedence are ignored
                below.pop(other if given == [usual] else usual, None)
        return below


def _with_alias(words: list[str]) -> list[str]:
    """Return a command line with --zero 3 in place of --fsdp."""
    pairs = zip(words, [*words[1:], "--"], strict=False)
    parts = (
        ["--zero", "3"] if word == "--fsdp" and following.startswith("--") else [word]
        for word, following in pairs
    )
    return list(chain.from_iterable(parts))


def each_once(arguments: list[str]) -> list[str]:
    """Drop from a command line the flags that a later one overrides: --steps=3 --load a --steps 6
    becomes --load a --steps 6.

    --no-X overrides --X, and the reverse.
    """
    return [word for words in _by_flag(arguments).values() for word in words]


def without(arguments: list[str], names: set[str]) -> list[str]:
    """Drop the flags of some settings from a command line. names: with underscores."""
    flags = _by_flag(arguments).items()
    dropped = {flag_of(name) for name in names}
    return [word for flag, words in flags if flag not in dropped for word in words]


def _by_flag(arguments: list[str]) -> dict[str, list[str]]:
    """Return the words of a command line by their flags, of each flag only the last."""
    flags: dict[str, list[str]] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name = flag_of(argument).replace("--no-", "--", 1)
            flags.pop(name, None)
        flags.setdefault(name, []).append(argument)
    return flags


def required(options: ImportOption, *names: str) -> list:
    """Run the --import file, then return the values of positional arguments.

    Raises UserError if one is missing.
    """
    if options.import_:
        run_file(options.import_)
    for name in names:
        if getattr(options, name) is None:
            raise UserError(f"the argument {name.upper()} is required (see --help)")
    for name in ("tp", "pp", "cp"):
        size = getattr(options, name, None)
        if size is not None and size < 1:
            raise UserError(f"--{name} {size} must be at least 1")
    return [getattr(options, name) for name in names]


def _value_of(flag: str, arguments: list[str]) -> str | None:
    """Return the last value of a flag in a command line."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == flag and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif argument.startswith(flag + "="):
            value = argument.partition("=")[2]
    return value


def _settings_in(file: str) -> tuple[bytes, bool]:
    """Return the bytes of a file of settings, and whether it is a pipe (allowed for one rank)."""
    with open(regular_file(file, or_pipe=world_size() == 1), "rb") as opened:
        data = opened.read(LARGEST_FILE + 1)
        status = os.fstat(opened.fileno())
    if len(data) > LARGEST_FILE:
        raise ValueError(f"it has more than {LARGEST_FILE:,} bytes")
    return data, stat.S_ISFIFO(status.st_mode)


def _toml_in(file: str) -> tuple[dict, bool]:
    """Return the contents of a TOML file, and whether the file is a pipe."""
    try:
        data, is_pipe = _settings_in(file)
        return tomllib.loads(data.decode()), is_pipe
    except OSError as error:
        raise UserError(f"--config {file}: {error.strerror}") from error
    except UserError:
        raise
    except (ValueError, RecursionError) as error:  # invalid or too deeply nested TOML
        raise UserError(f"--config {file} is not TOML: {error}") from error


def _check_keys(kind: type, settings: dict, file: str) -> None:
    """Raise UserError for unknown keys of a TOML file, and for tables and lists in place of single
    values. Keys are the names of flags with underscores."""
    declared = described(kind)
    known = {name: d for name, d in settings_of(kind).items() if declared[name].in_files}
    if unknown := [key for key in settings if key not in known]:
        raise UserError(f"{file}: {about_unknown('key', unknown, set(known))}")
    for key, value in settings.items():
        several = isinstance(value, list) and not isinstance(known[key], tuple)
        if isinstance(value, dict) or several:
            words = several and all(isinstance(each, str) for each in value)
            hint = f", such as {brief(','.join(value))}" if words and value else ""
            raise UserError(f"{file}: {key} must be a single value{hint}")
