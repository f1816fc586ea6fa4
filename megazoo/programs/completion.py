"""Print a shell script that completes the commands and options of megazoo.

$ megazoo completion bash >> ~/.bashrc
$ megazoo completion zsh >> ~/.zshrc
$ megazoo completion fish > ~/.config/fish/completions/megazoo.fish
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated

from tyro.conf import Positional

from megazoo.cli.flags import parse_flags
from megazoo.commands import COMMANDS
from megazoo.errors import UserError
from megazoo.families.registry import FAMILIES, presets
from megazoo.settings import choices_of, flag_of, kinds_of, unset
from megazoo.trainer.options import Options as TrainingOptions

SHELLS = ("bash", "zsh", "fish")
# Completes the words of a command, then the values of an option; otherwise file names.
BASH = """\
_megazoo() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
    case "${{COMP_WORDS[*]:1:COMP_CWORD-1}} " in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _megazoo megazoo"""


@dataclass
class Options:
    """Shell."""

    shell: Positional[Annotated[str | None, unset("{bash,zsh,fish}")]] = None
    """Shell of the completion script."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    if options.shell not in SHELLS:
        found = f"shell {options.shell!r} is not supported" if options.shell else "name the shell"
        raise UserError(f"{found}: use one of {', '.join(SHELLS)}")
    print(fish() if options.shell == "fish" else bash(options.shell))


def flags_of(module: str) -> dict[str, list[str]]:
    """Return the flags of a command with their valid values; [] if any value is valid."""
    kinds = kinds_of(getattr(import_module(module), "Options", TrainingOptions))
    names = {"model": sorted(FAMILIES), "preset": sorted(presets().keys() - FAMILIES.keys())}
    positional = Positional
    return {
        flag_of(name): names.get(name) or [str(choice) for choice in choices_of(kind)]
        for name, kind in kinds.items()
        if positional not in getattr(kind, "__metadata__", ())
    }


def bash(shell: str) -> str:
    """Return the script for bash, which zsh runs too."""
    cases = [f'        " ") words="{" ".join(first_words())}" ;;']
    for command in sorted(COMMANDS, key=lambda command: -len(command.name)):
        flags = flags_of(command.module)
        for flag, values in flags.items():
            if values:
                cases.append(f'        "{command.name}"*" {flag} ") words="{" ".join(values)}" ;;')
        cases.append(f'        "{command.name} "*) words="{" ".join(flags)}" ;;')
    for group in groups():
        cases.append(f'        "{group} "*) words="{" ".join(second_words(group))}" ;;')
    script = BASH.format(cases="\n".join(cases))
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def fish() -> str:
    """Return the script for fish."""
    words = " ".join(first_words())
    lines = [f"complete -c megazoo -f -n __fish_use_subcommand -a '{words}'"]
    for group in groups():
        seen = f"__fish_seen_subcommand_from {group}"
        lines.append(f"complete -c megazoo -f -n '{seen}' -a '{' '.join(second_words(group))}'")
    for command in COMMANDS:
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.name.split())
        for flag, values in flags_of(command.module).items():
            choices = f" -xa '{' '.join(values)}'" if values else ""
            lines.append(f"complete -c megazoo -n '{seen}' -l {flag[2:]}{choices}")
    return "\n".join(lines)


def groups() -> list[str]:
    """Return the first words of the commands that have two."""
    return list(dict.fromkeys(c.name.split()[0] for c in COMMANDS if " " in c.name))


def first_words() -> list[str]:
    return list(dict.fromkeys(command.name.split()[0] for command in COMMANDS))


def second_words(group: str) -> list[str]:
    return [c.name.split()[1] for c in COMMANDS if c.name.startswith(f"{group} ")]
