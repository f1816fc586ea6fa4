"""Files of the user that --import names: they register models, schedules and other parts."""

import importlib.util
import sys
import traceback
from pathlib import Path

from megazoo.errors import UserError
from megazoo.files import brief, regular_file

# Files that --import has run. An error that passes through one may be an error in that file.
user_files: list[str] = []


def run_file(file: Path) -> None:
    """Run a Python file that registers a model, a data source, a schedule or callbacks.

    Raises UserError with the file and the line of an exception in it.
    """
    try:
        is_file, is_directory = regular_file(file).is_file(), file.is_dir()
    except OSError as error:  # of a name that is too long, for example
        raise UserError(f"--import {brief(str(file))}: {error.strerror}", exit_code=1) from error
    if not is_file:
        raise UserError(
            f"--import {file}: {'it is a directory' if is_directory else 'no such file'}"
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise UserError(f"--import {file} is not a Python file: its name must end in .py")
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    user_files.append(str(spec.origin))
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except SyntaxError as error:  # in the file, or in a module that it imports
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
