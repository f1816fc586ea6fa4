"""The training program's command line and TOML file, and what the tools that open a model take."""

import importlib.util
import os
import stat
import sys
import tomllib
import traceback
from pathlib import Path

from megazoo.cli.flags import flag_of, parse_flags, settings_of, typed_settings
from megazoo.cli.mistakes import user_files
from megazoo.cli.options import ImportOption, Options
from megazoo.cli.rules import check_value, check_values, settle_steps
from megazoo.environment import world_size
from megazoo.errors import UserError, nearest
from megazoo.files import brief, regular_file

# Settings that take each other's place: the one that has a default, and the other.
EITHER_OR = (("steps", "epochs"), ("data", "mock_data"))
LARGEST_FILE = 1 << 20  # bytes of settings
_piped: dict[int, bytes] = {}  # what pipes held, by their inodes: they can be read once


def parse_options(
    arguments: list[str],
    description: str,
    resumed: dict | None = None,
    origin: str = "the checkpoint",
) -> Options:
    """Return the options of a command line, over those of the TOML file that its --config names.
    See `parse_flags`.

    resumed: `settings_to_resume` of the run that is resumed, below both. origin: the file that has
    them, for errors.
    """
    file = _value_of("--config", arguments)
    settings = typed_settings(Options, _toml_settings(file), file, words=True) if file else {}
    resumed = typed_settings(Options, resumed or {}, origin)
    for name, value in resumed.items():
        check_value(name, value, origin)
    lower = {**resumed, **settings}
    flags = {flag_of(argument) for argument in arguments if argument.startswith("--")}
    for pair in EITHER_OR:
        usual, other = pair
        given = [name for name in pair if flag_of(name) in flags]
        given = given or [name for name in pair if settings.get(name)]
        if len(given) > 1:
            raise UserError(f"give {usual} or {other.replace('_', '-')}, not both")
        if given or lower.get(other):  # what is given further below doesn't count
            lower.pop(other if given == [usual] else usual, None)
    options = parse_flags(Options, arguments, description, lower)
    if file and _is_piped(file) and options.parallel.replica > 1:
        raise UserError(f"--config {file} is a pipe, which several ranks can't read: give a file")
    if options.data.mock_data:
        options.data.data = ("mock",)
    if options.optimizer.min_lr is None:
        options.optimizer.min_lr = options.optimizer.lr / 10
    check_values(options)
    settle_steps(options)
    return options


def gives(arguments: list[str], name: str) -> bool:
    """Return whether a command line, or the TOML file that its --config names, gives a setting."""
    file = _value_of("--config", arguments)
    flags = {flag_of(argument) for argument in arguments if argument.startswith("--")}
    return flag_of(name) in flags or bool(file and name in _toml_settings(file))


def each_once(arguments: list[str]) -> list[str]:
    """Drop from a command line the flags that a later one overrides: --steps=3 --load a --steps 6
    becomes --load a --steps 6.

    --no-X overrides --X, and the reverse.
    """
    flags: dict[str, list[str]] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name = flag_of(argument).replace("--no-", "--", 1)
            flags.pop(name, None)
        flags.setdefault(name, []).append(argument)
    return [word for words in flags.values() for word in words]


def required(options: ImportOption, *names: str) -> list:
    """Run the --import file, then return the values of positional arguments, each of which must be
    given."""
    if options.import_:
        run_file(options.import_)
    for name in names:
        if getattr(options, name) is None:
            raise UserError(f"name the {name} (--help says how)")
    if getattr(options, "tp", 1) < 1 or getattr(options, "pp", 1) < 1:
        raise UserError(f"tp {options.tp} and pp {options.pp} must each be at least 1")
    if getattr(options, "cp", 1) < 1:
        raise UserError(f"cp {options.cp} must be at least 1")
    return [getattr(options, name) for name in names]


def run_file(file: Path) -> None:
    """Run a user's Python file, which registers a model, a schedule or callbacks. UserError, naming
    the file and its line, for what it raises."""
    if not regular_file(file).is_file():
        raise UserError(
            f"--import {file}: {'it is a directory' if file.is_dir() else 'no such file'}"
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None:
        raise UserError(f"--import {file}: the name of a Python file ends in .py")
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    user_files.append(spec.origin)
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except SyntaxError as error:  # in it, or in what it imports
        where = error.filename or file
        raise UserError(
            f"--import {file} is not Python: {error.msg}"
            + (f" ({where}, line {error.lineno})" if error.lineno else "")
        ) from error
    except SystemExit as error:
        raise UserError(
            f"--import {file} ends the program: it calls sys.exit({error.code!r})"
        ) from error
    except Exception as error:
        steps = traceback.extract_tb(error.__traceback__)
        line = next(step.lineno for step in reversed(steps) if step.filename == spec.origin)
        raise UserError(
            f"--import {file}, line {line}: {type(error).__name__}: {error} "
            f"(`python {file}` shows more)"
        ) from error


def _value_of(flag: str, arguments: list[str]) -> str | None:
    """The last value of a flag in a command line."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == flag and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif argument.startswith(flag + "="):
            value = argument.partition("=")[2]
    return value


def _settings_in(file: str) -> bytes:
    """Return the bytes of a file of settings, which may be a pipe if there is one rank."""
    if _is_piped(file):
        return _piped[os.stat(file).st_ino]
    with open(regular_file(file, or_pipe=world_size() == 1), "rb") as opened:
        data = opened.read(LARGEST_FILE + 1)
        status = os.fstat(opened.fileno())
    if len(data) > LARGEST_FILE:
        raise ValueError(f"it has more than {LARGEST_FILE:,} bytes")
    if stat.S_ISFIFO(status.st_mode):
        _piped[status.st_ino] = data
    return data


def _is_piped(file: str) -> bool:
    """Say whether a file is a pipe that has been read."""
    return Path(file).is_fifo() and os.stat(file).st_ino in _piped


def _toml_settings(file: str) -> dict:
    """A TOML file's settings, by the names of the flags with underscores."""
    known = settings_of(Options)
    known.pop("config")
    try:
        settings = tomllib.loads(_settings_in(file).decode())
    except OSError as error:
        raise UserError(f"--config {file}: {error.strerror}") from error
    except UserError:
        raise
    except (ValueError, RecursionError) as error:  # of what is no TOML, and of TOML too deep
        raise UserError(f"--config {file} is not TOML: {error}") from error
    for key, value in settings.items():
        if key not in known:
            raise UserError(f"{file}: unknown key {key}{nearest(key, known)}")
        several = isinstance(value, list) and not isinstance(known[key], tuple)
        if isinstance(value, dict) or several:
            words = several and all(isinstance(each, str) for each in value)
            hint = f", such as {brief(','.join(value))}" if words and value else ""
            raise UserError(f"{file}: {key} must be a single value{hint}")
    return settings
