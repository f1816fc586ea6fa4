"""How a program runs: its help, and how it ends; a user's mistake is told in one line."""

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

from megazoo.cli.commands import Command, command_named, documentation, program_name
from megazoo.cli.flags import parse_flags
from megazoo.cli.launch.starting import end_with_launcher
from megazoo.cli.mistakes import is_of_network, line_of, tell_bug
from megazoo.cli.options import Options
from megazoo.environment import adopt_launcher
from megazoo.errors import Advice, UserError
from megazoo.files import reason_of
from megazoo.terminal import print_error

# Seconds that other ranks wait before they print a mistake: one that all have found is printed by
# rank 0, and the launcher ends the others meanwhile.
REPORT_DELAY = 10.0


def run_script(name: str, *arguments: str) -> NoReturn:
    """Run a command as a script of a clone, with these arguments before those of the command line,
    and exit."""
    run_command(command_named(name), [*arguments, *sys.argv[1:]])


def run_command(command: Command, arguments: list[str]) -> NoReturn:
    """Run a command with these words of a command line, and exit."""
    sys.argv[1:] = [*command.arguments, *arguments]
    if command.name == "pretrain" and arguments in (["--help"], ["-h"]):
        text = documentation(command)  # without torch, whose import takes seconds
        run_program(lambda words: parse_flags(Options, words, text))
    run_program(lambda words: import_module(command.module).main(words))
    sys.exit(0)


@contextmanager
def _alone_if_it_fails():
    """Have a process that fails within end at once: it does not wait for other ranks to end."""
    try:
        yield
    except BaseException:
        if ending := sys.modules.get("megazoo.parallel.ending"):  # which would load torch
            ending.leave()
        raise


def _print_plainly() -> None:
    """Print advice as a line of its own, and any file's name."""
    usual = warnings.formatwarning

    def formatted(message, category, filename, lineno, line=None) -> str:
        if category is Advice:
            return f"warning: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a notebook's is not
            stream.reconfigure(errors="backslashreplace")  # a file's name may be no text


@_alone_if_it_fails()
def run_program(main: Callable[[list[str]], None]) -> None:
    """Run main(arguments) and exit: 0, or after one line on stderr for a mistake, with a
    UserError's exit code, else 1. Of a bug, the traceback is printed, too.

    A mistake that all ranks find is printed by rank 0; the launcher ends the others, which wait.
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
        _end(str(error), error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        lost = _lost_output()
        if isinstance(lost or error, BrokenPipeError):  # of `| head`, say, which has read enough
            sys.exit(128 + signal.SIGPIPE)
        if lost:
            _end(f"standard output: {reason_of(lost)}")
        if is_of_network(error):
            # gloo says so of a peer that ended; what that one prints comes first.
            if "Connection" in str(error):
                time.sleep(REPORT_DELAY)
            raise
        if line := line_of(error):
            _end(line)
        tell_bug(error)
        sys.exit(1)


def _end(line: str, exit_code: int = 1) -> NoReturn:
    """Print why the program ends, on ranks above 0 after a moment, and exit."""
    rank = os.environ.get("RANK", "")  # as it stands: it may be what is wrong
    if rank.isdecimal() and rank.strip("0"):
        time.sleep(REPORT_DELAY)
    line = " ".join(line.split())
    print_error(f"{program_name()}: error: {line}")
    sys.exit(exit_code)


def _lost_output() -> OSError | None:
    """Return why what was printed can't be written, if it can't. Python's end does not try again
    then."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None
