"""List model families and presets: sizes, and names of the weights on the Hugging Face hub.

$ megazoo models
$ megazoo models llama
$ megazoo models qwen3-8b
"""

import json
from dataclasses import asdict, dataclass
from typing import Annotated

from tyro.conf import Positional

from megazoo.cli.flags import parse_flags
from megazoo.cli.options import ImportOption
from megazoo.cli.text import table
from megazoo.errors import UserError, nearest
from megazoo.families.published import published
from megazoo.families.registry import FAMILIES
from megazoo.files import write_text
from megazoo.models.counts import parameter_count
from megazoo.settings import File, unset
from megazoo.user_files import run_file

COLUMNS = [
    "preset",
    "parameters",
    "layers",
    "hidden",
    "heads",
    "kv heads",
    "positions",
    "vocabulary",
]


@dataclass
class Options(ImportOption):
    """Families and presets."""

    name: Positional[Annotated[str | None, unset("NAME", "all")]] = None
    """Family or preset to list."""
    json: File = None
    """JSON file to write the list to. -: write JSON to stdout instead of the table."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    if options.import_:
        run_file(options.import_)
    rows = found(options.name)
    text = json.dumps(rows, indent=1)
    if str(options.json) == "-":
        print(text)
        return
    print("\n".join(details(rows[0]) if options.name not in (None, *FAMILIES) else lines_of(rows)))
    if options.json:
        write_text("--json", options.json, text + "\n")


def found(name: str | None) -> list[dict]:
    """Return a row for each preset, or for those of a name. UserError if the name is unknown."""
    rows = [
        row_of(family, preset)
        for family, model in FAMILIES.items()
        for preset in model.presets
        if preset != family
        and name in (None, family, preset)  # the name of a family is an alias of its tiny preset
    ]
    if name is not None and not rows:
        known = {*FAMILIES, *(preset for model in FAMILIES.values() for preset in model.presets)}
        raise UserError(f"unknown model or preset {name!r}{nearest(name, known)}")
    return rows


def row_of(family: str, preset: str) -> dict:
    """Return the sizes, the hub name and the pretraining settings of a preset."""
    config = FAMILIES[family].presets[preset]
    source = published(preset)
    return {
        "family": family,
        "preset": preset,
        "parameters": parameter_count(config),
        "hub": source.hub,
        "lr": source.lr,
        "batch_tokens": source.batch_tokens,
        "config": asdict(config),
    }


def lines_of(rows: list[dict]) -> list[str]:
    """Return the lines of a table for each family."""
    lines = []
    for family in dict.fromkeys(row["family"] for row in rows):
        cells = [[*COLUMNS, "Hugging Face"]]
        for row in rows:
            config = row["config"]
            kv_heads = config.get("kv_heads") or config["heads"]
            sizes = [config["layers"], config["hidden_size"], config["heads"], kv_heads]
            sizes += [config["max_positions"], config["vocab_size"]]
            if row["family"] == family:
                cells.append(
                    [row["preset"], f"{row['parameters']:,}", *map(str, sizes), row["hub"] or ""]
                )
        lines += [
            f"{family} (--model {family} selects {family}-tiny)",
            *table(cells, left=(0, -1)),
            "",
        ]
    return [
        *lines,
        "--load NAME downloads and loads weights from the Hugging Face hub.",
    ]


def details(row: dict) -> list[str]:
    """Return the lines that describe a preset in full."""
    lines = [f"{row['preset']}: {row['family']}, {row['parameters']:,} parameters"]
    lines += [f"  {name:22} {value}" for name, value in row["config"].items()]
    rate = f"learning rate {row['lr']:g}" if row["lr"] else "learning rate not recorded"
    tokens = row["batch_tokens"]
    batch = f"{tokens:,} tokens per step" if tokens else "batch not recorded"
    lines += [f"  {'pretrained with':22} {rate}, {batch}"]
    lines += [f"from random weights: megazoo pretrain --preset {row['preset']}"]
    if row["hub"]:
        lines += [f"from its weights:    megazoo pretrain --load {row['hub']}"]
    return lines
