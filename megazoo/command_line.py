"""The training program's command line and TOML file, and what the tools that open a model take."""

import importlib.util
import sys
import tomllib
from pathlib import Path

from megazoo.config import ImportOption, Options, check_values
from megazoo.errors import UserError, nearest
from megazoo.flags import parse_flags, settings_of


def parse_options(arguments: list[str], description: str, resumed: dict | None = None) -> Options:
    """The options of a command line, over those of the TOML file that its --config names. See `parse_flags`.

    resumed: `settings_to_resume` of the run that goes on, below both.
    """
    file = _value_of("--config", arguments)
    lower = _as_flags(resumed or {}) + (_toml_arguments(file) if file else [])
    options = parse_flags(Options, lower + arguments, description)
    optimizer = options.optimizer
    if optimizer.min_lr is None:
        optimizer.min_lr = optimizer.lr / 10
    if optimizer.lr_decay_steps is None:
        optimizer.lr_decay_steps = options.training.steps
    if optimizer.warmup_steps is None:
        optimizer.warmup_steps = min(optimizer.lr_decay_steps // 4, 2000)
    check_values(options)
    return options


def required(options: ImportOption, *names: str) -> list:
    """The values of positional arguments, each of which must be given; runs the --import file first."""
    if options.import_:
        run_file(options.import_)
    for name in names:
        if getattr(options, name) is None:
            raise UserError(f"name the {name} (--help says how)")
    if getattr(options, "tp", 1) < 1 or getattr(options, "pp", 1) < 1:
        raise UserError(f"tp {options.tp} and pp {options.pp} must each be at least 1")
    return [getattr(options, name) for name in names]


def run_file(file: Path) -> None:
    """Run a user's Python file, which registers a model."""
    if not file.is_file():
        raise UserError(f"--import {file}: no such file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _value_of(flag: str, arguments: list[str]) -> str | None:
    for index, argument in enumerate(arguments):
        if argument == flag and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(flag + "="):
            return argument.partition("=")[2]
    return None


def _toml_arguments(file: str) -> list[str]:
    """A TOML file's settings as flags, so that one parser checks both."""
    known = settings_of(Options)
    known.pop("config")
    try:
        settings = tomllib.loads(Path(file).read_text())
    except OSError as error:
        raise UserError(f"--config {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--config {file} is not TOML: {error}") from error
    for key, value in settings.items():
        if key not in known:
            raise UserError(f"{file}: unknown key {key}{nearest(key, known)}")
        if isinstance(value, list | dict):
            raise UserError(f"{file}: {key} must be a single value")
    return _as_flags(settings)


def _as_flags(settings: dict) -> list[str]:
    flags, defaults = [], settings_of(Options)
    for key, value in settings.items():
        name = key.replace("_", "-")
        if isinstance(value, bool) and isinstance(defaults.get(key), bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", str(value)]
    return flags
