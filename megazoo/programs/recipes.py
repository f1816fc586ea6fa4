"""List ready configuration files for `megazoo pretrain --config`, or copy one.

$ megazoo recipes
$ megazoo recipes lora_smollm2 .

Each file starts with comments: its purpose, what it needs, and the command that starts it. Edit the
copy to use other data, models or GPUs.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from megazoo.cli.flags import parse_flags
from megazoo.cli.text import table
from megazoo.errors import UserError, nearest
from megazoo.files import write_text
from megazoo.settings import unset

RECIPES = Path(__file__).parents[1] / "recipes"  # in a clone, a link to configs/
START = "# Start: "


@dataclass
class Options:
    """Recipe and target."""

    name: Positional[Annotated[str | None, unset("NAME", "all")]] = None
    """Recipe to copy."""
    directory: Positional[Annotated[str | None, unset("DIR")]] = None
    """Directory to copy it to. It is created if it does not exist."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    if options.name is None:
        print("\n".join(lines()))
        return
    name, known = options.name.removesuffix(".toml"), names()
    if name not in known:
        hint = nearest(name, set(known))
        raise UserError(f"unknown recipe {name!r}{hint}; supported: {', '.join(known)}")
    if options.directory is None:
        raise UserError(f"name the directory to copy to: megazoo recipes {name} DIR")
    target = Path(options.directory, f"{name}.toml")
    if target.exists():
        raise UserError(f"{target} exists: use another directory, or remove it")
    text = text_of(name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"can't create the directory {target.parent}: {error.strerror}") from error
    write_text("DIR", target, text)
    print(f"wrote {target}; its comments list what it needs. Start it with")
    print(f"  {command_of(name, text).replace(target.name, shlex.quote(str(target)))}")


def names() -> list[str]:
    """Return the names of the recipes."""
    return sorted(file.stem for file in RECIPES.glob("*.toml"))


def text_of(name: str) -> str:
    """Return the text of a recipe."""
    return (RECIPES / f"{name}.toml").read_text(encoding="utf-8")


def command_of(name: str, text: str) -> str:
    """Return the command that starts a recipe, from its comments."""
    (line,) = [line for line in text.splitlines() if line.startswith(START)]
    assert f"--config {name}.toml" in line
    return line.removeprefix(START)


def lines() -> list[str]:
    """Return a line for each recipe, and one that describes how to copy it."""
    rows = [[name, text_of(name).splitlines()[0].removeprefix("# ")] for name in names()]
    return [*table(rows, left=(0, 1)), "", "megazoo recipes NAME DIR copies one to a directory."]
