"""The scripts of a clone, and the modules behind them."""

import importlib
import re
from pathlib import Path
from types import ModuleType

from megazoo.commands import command_named
from megazoo.programs import convert

ROOT = Path(__file__).parents[2]
merge_shards = ModuleType("merge_shards")
merge_shards.__file__ = "merge_shards.py"
merge_shards.Options = convert.Options
merge_shards.main = lambda words: convert.main(["--to", "hf", *words])


def program_of(script: str) -> ModuleType:
    """The program that a script runs: pretrain_gpt.py, or one of tools/, by its path or name."""
    if Path(script).stem == "merge_shards":
        return merge_shards
    path = ROOT / ("" if Path(script).stem == "pretrain_gpt" else "tools") / Path(script).name
    named = re.search(r'run_script\("([^"]+)"', path.with_suffix(".py").read_text())
    return importlib.import_module(command_named(named[1]).module)
