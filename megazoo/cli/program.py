"""Run programs: print their help, their errors in one line, and set their exit codes."""

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager, suppress
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

from megazoo.cli.flags import parse_flags
from megazoo.cli.mistakes import is_of_network, line_of, tell_bug
from megazoo.commands import Command, command_named, documentation, program_name
from megazoo.environment import adopt_launcher
from megazoo.errors import Advice, UserError
from megazoo.files import reason_of
from megazoo.launching.orphans import end_with_launcher
from megazoo.terminal import print_error
from megazoo.trainer.options import Options

# Seconds that other ranks wait before they print an error. If all ranks found it, rank 0 prints it
# and the launcher ends the others in this time.
REPORT_DELAY = 10.0


def run_script(name: str, *arguments: str) -> NoReturn:
    """Run a command as a script of a clone, and exit. `arguments` precede those of the command
    line."""
    run_command(command_named(name), [*arguments, *sys.argv[1:]])


def run_command(command: Command, arguments: list[str]) -> NoReturn:
    """Run a command with these arguments, and exit."""
    sys.argv[1:] = [*command.arguments, *arguments]
    if command.name == "pretrain" and arguments in (["--help"], ["-h"], ["--help-all"]):
        text = documentation(command)  # without importing torch, which takes seconds
        run_program(lambda words: parse_flags(Options, words, text))
    run_program(lambda words: import_module(command.module).main(words))
    sys.exit(0)


@contextmanager
def _alone_if_it_fails():
    """On an error, let this process exit immediately instead of waiting for other ranks."""
    try:
        yield
    except BaseException:
        if ending := sys.modules.get("megazoo.parallel.ending"):  # importing it would load torch
            ending.leave()
        raise


def _print_plainly() -> None:
    """Print each Advice on a separate line, and escape file names that are not valid text."""
    usual = warnings.formatwarning

    def formatted(message, category, filename, lineno, line=None) -> str:
        if category is Advice:
            return f"warning: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not in notebooks
            stream.reconfigure(errors="backslashreplace")  # for invalid file names


@_alone_if_it_fails()
def run_program(main: Callable[[list[str]], None]) -> None:
    """Run main(arguments), print an error in one line on stderr, and set the exit code. The details
    of a UserError follow in further lines.

    The exit code is that of a UserError, otherwise 1. For a bug, the traceback is also printed. If
    all ranks find an error, rank 0 prints it. The others wait, and the launcher ends them.
    """
    _print_plainly()
    try:
        sys.argv[1:] = adopt_launcher(sys.argv[1:], os.environ)
        end_with_launcher()
        try:
            main(sys.argv[1:])
        except SystemExit:  # after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except UserError as error:
        _end(str(error), error.exit_code, error.details)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        lost = _lost_output()
        if isinstance(lost or error, BrokenPipeError):  # for example `| head`
            sys.exit(128 + signal.SIGPIPE)
        if lost:
            _end(f"standard output: {reason_of(lost)}")
        if is_of_network(error):
            # gloo raises this error when a peer ended. Let the peer print its message first.
            if "Connection" in str(error):
                time.sleep(REPORT_DELAY)
            raise
        if line := line_of(error):
            _end(line)
        tell_bug(error)
        sys.exit(1)


def _end(line: str, exit_code: int = 1, details: tuple[str, ...] = ()) -> NoReturn:
    """Print an error, with its details below it, and exit. Ranks above 0 wait for REPORT_DELAY
    first."""
    rank = os.environ.get("RANK", "")  # not validated: it may be the error
    if rank.isdecimal() and rank.strip("0"):
        time.sleep(REPORT_DELAY)
    line = " ".join(line.split())
    text = "\n  ".join([f"{program_name()}: error: {line}", *details])
    _write_error_file(text)
    print_error(text)
    sys.exit(exit_code)


def _write_error_file(text: str) -> None:
    """Write an error to the file that torchrun reads, so that the report of torchrun ends with it.

    The format is that of torch.distributed.elastic.multiprocessing.errors.ErrorHandler, which would
    write a traceback.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def _lost_output() -> OSError | None:
    """Flush standard output and return the error, if any. After an error, the output goes to
    /dev/null, so that the exit of Python does not fail too."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None
