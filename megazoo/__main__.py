"""The command `megazoo`: find the command that the first words name, and run it."""

import sys
from typing import NoReturn

from megazoo.commands import COMMANDS, started_as
from megazoo.errors import nearest


def main() -> NoReturn:
    """Run the command line `megazoo NAME ...`, and exit."""
    words = sys.argv[1:]
    for command in COMMANDS:
        name = command.name.split()
        if words[: len(name)] == name:
            from megazoo.cli.program import (
                run_command,
            )  # imported here: the help below needs no other library

            started_as(command)
            run_command(command, words[len(name) :])
    if not words or words[0] in ("--help", "-h", "help"):
        print(_help())
        sys.exit(0)
    if words[0] == "--version":
        print(f"megazoo {sys.modules['megazoo'].__version__}")
        sys.exit(0)
    group = [command for command in COMMANDS if command.name.split()[0] == words[0]]
    if group and words[1:] in (["--help"], ["-h"]):
        print(_help(words[0]))
        sys.exit(0)
    sys.exit(_mistake(words, [command.name for command in group]))


def _help(group: str = "") -> str:
    """Return the help: all commands, or those of a group."""
    commands = [command for command in COMMANDS if command.name.startswith(group)]
    width = max(len(command.name) for command in commands)
    lines = [f"  {command.name:{width}}  {command.summary}" for command in commands]
    usage = f"usage: megazoo {f'{group} ' if group else ''}COMMAND [options]"
    return "\n".join(
        [
            usage,
            "",
            "Train language models with tensor, pipeline, context and data parallelism.",
            "",
            *lines,
            "",
            "`megazoo COMMAND --help` lists the options of a command. pretrain, generate, chat and",
            "evaluate start the ranks of --tp, --pp and --cp on this machine, pretrain also those",
            "of --dp. Several machines: `torchrun --nnodes N --nproc-per-node M ... -m megazoo",
            "COMMAND ...`.",
        ]
    )


def _mistake(words: list[str], group: list[str]) -> int:
    """Print one line about an unknown command, and return the exit code."""
    if group:
        choices = ", ".join(name.partition(" ")[2] for name in group)
        found = f" {words[1]!r}" if words[1:] else ""
        line = f"{words[0]}: unknown command{found}: use one of {choices}"
        if not found:
            line = f"{words[0]} needs one of {choices}"
    else:
        names = [command.name for command in COMMANDS]
        hint = nearest(words[0], {name.split()[0] for name in names})
        line = f"unknown command {words[0]!r}{hint} (megazoo --help lists all)"
    print(f"megazoo: error: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
