"""Write into the pages what they take from the code: the table of flags in docs/options.md, of
commands in docs/command.md, of families and presets in docs/models.md, and the file of Qwen3 in
docs/new_model.md; with --self-test, which takes some minutes, also the gallery of
mistakes in docs/planted_bugs.md; with --notebook, which takes a minute, also the outputs of
docs/first_model.ipynb.

$ python -m tests.docs.refresh_docs

tests/docs/test_pages.py compares them with the code.
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import MISSING, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Literal, get_args, get_origin

import nbformat

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from megazoo.commands import COMMANDS  # noqa: E402
from megazoo.errors import UserError  # noqa: E402
from megazoo.families.registry import FAMILIES  # noqa: E402
from megazoo.families.table import PRESETS  # noqa: E402
from megazoo.formats.configs import config_from_hugging_face  # noqa: E402
from megazoo.formats.gguf.architecture import ARCHITECTURES  # noqa: E402
from megazoo.formats.hugging_face.export import hugging_face_config  # noqa: E402
from megazoo.layers.rotary import SCALINGS  # noqa: E402
from megazoo.programs import models  # noqa: E402
from megazoo.settings import flag_of, kinds_of, texts_of  # noqa: E402
from megazoo.trainer import options as settings  # noqa: E402
from megazoo.trainer.outputs import OUTPUTS  # noqa: E402
from tests.support.notebook import NOTEBOOK, executed  # noqa: E402

OPTIONS = ROOT / "docs" / "options.md"
NEW_MODEL = ROOT / "docs" / "new_model.md"
README = ROOT / "README.md"
MODELS = ROOT / "megazoo" / "models"
TABLE = ROOT / "megazoo" / "families" / "table.py"
QWEN3 = ROOT / "megazoo" / "models" / "qwen3.py"
BLOCK_OF_QWEN3 = re.compile(r'(?<=^```python\n)"""Qwen3.*?(?=^```$)', re.DOTALL | re.MULTILINE)
PLANTED = ROOT / "docs" / "planted_bugs.md"
GALLERY = "<!-- gallery: from tools/check_parallel.py --self-test -->\n"
END_OF_GALLERY = "<!-- end of gallery -->\n"
BEGIN, END = "<!-- flags: from megazoo/trainer/options.py -->\n", "<!-- end of flags -->\n"

# By command: further scripts that run it. test_pages.py finds a script of tools/ without a row.
MORE_SCRIPTS = {
    "convert": ("tools/reshard.py", "tools/merge_shards.py", "tools/convert_megatron.py"),
}
# By class: the heading of its table.
HEADINGS = {
    "ModelOptions": "Model",
    "ParallelOptions": "Parallelism",
    "TrainingOptions": "Steps, batch size, precision",
    "LoRAOptions": "LoRA",
    "OptimizerOptions": "Optimizer and learning rate",
    "LossOptions": "Loss",
    "DataOptions": "Data and tokenizer",
    "CheckpointOptions": "Checkpoints",
    "EvaluationOptions": "Evaluation",
    "LoggingOptions": "Logging and profiling",
    "Options": "Configuration file and dry run",
}
NO_GROUP = "Flags that read or print the settings of a run."


def _architecture(config) -> str:
    """Return the class of transformers for a config, or "no"."""
    try:
        return hugging_face_config(config)["architectures"][0]
    except UserError:
        return "no"


def flag_table() -> str:
    """Return one table for each group of settings: flag, default, effect."""
    groups = [f.default_factory for f in fields(settings.Options) if f.default_factory != MISSING]
    tables = []
    for group in (*groups, settings.Options):
        heading = HEADINGS[group.__name__]
        kinds, families = kinds_of(group), ", ".join(PRESETS)
        texts = {n: text.replace("{families}", families) for n, text in texts_of(group).items()}
        rows = [
            row(f, kinds[f.name.rstrip("_")], " ".join(texts.get(f.name, "").split()))
            for f in fields(group)
            if group is not settings.Options or not is_dataclass(f.default_factory)
        ]
        about = group.__doc__ if group is not settings.Options else NO_GROUP
        about = " ".join(about.split())
        head = "| flag | default | effect |\n|---|---|---|\n"
        tables.append(f"## {heading}\n\n{about}\n\n{head}{''.join(rows)}")
    return "\n".join(tables)


def row(field, hint, text: str) -> str:
    """Return a setting's line of the table. Without a text below it, its annotation has one."""
    extras = getattr(hint, "__metadata__", ())
    text = text or " ".join(extra.help for extra in extras if extra.help)
    told = "".join(str(extra.help_behavior_hint or "") for extra in extras)
    default = told.removeprefix("(default: ").removesuffix(")") or written(field.default)
    kind = get_args(hint)[0] if extras else hint
    choices = ", ".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
    for extra in extras:  # {a,b,...} where the help has it in place of a type
        if (extra.metavar or "").startswith("{"):
            choices = extra.metavar.strip("{}").replace(",", ", ")
    flag = "--" + field.name.rstrip("_").replace("_", "-")
    cells = (f"`{flag}`" + (f": {choices}" if choices else ""), default, text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def written(default) -> str:
    """Return a default as one types it."""
    if default is None or isinstance(default, bool):
        return {None: "none", True: "on", False: "off"}[default]
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return str(default)


def command_table() -> str:
    """Return a table of the commands, and of the scripts that run them."""
    table = "| command | script | purpose |\n|---|---|---|\n"
    for each in COMMANDS:
        scripts = [each.script, *MORE_SCRIPTS.get(each.name, ())]
        script = ", ".join(f"`{name}`" for name in scripts if name)
        table += f"| `megazoo {each.name}` | {script} | {each.summary} |\n"
    return table


def family_table() -> str:
    """Return a table with one row for each family."""
    table = (
        "| family | model_type | language model | classifier | presets | GGUF | RoPE scaling |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    for name, model in FAMILIES.items():
        config = model.presets[f"{name}-tiny"]
        heads = [config, replace(config, num_labels=2)]
        architectures = [_architecture(head) for head in heads]
        cells = [
            f"[{name}](#{name})",
            f"`{model.HUGGING_FACE.model_type or name}`",
            *(f"`{architecture}`" for architecture in architectures),
            str(len(models.found(name))),
            f"`{ARCHITECTURES[name]}`" if name in ARCHITECTURES else "no",
            ", ".join(f"`{kind}`" for kind in SCALINGS if reads_scaling(config, kind)) or "no",
        ]
        table += f"| {' | '.join(cells)} |\n"
    return table


def reads_scaling(config, kind: str) -> bool:
    """Return whether a family reads a config.json with this scaling of rotary positions."""
    numbers = ("factor", "low_freq_factor", "high_freq_factor")
    scaling = {"rope_type": kind, **dict.fromkeys(numbers, 2.0), "high_freq_factor": 4.0}
    values = config.to_hugging_face() | {"rope_scaling": scaling}
    try:
        return kind != "default" and config_from_hugging_face(values).rope_scaling is not None
    except UserError:
        return False


def families_of_files() -> dict[str, tuple[str, type]]:
    """Return the title and the class of each family by its name, from the files of
    megazoo/models/."""
    found = {}
    for path in sorted(MODELS.glob("*.py")):
        text = path.read_text()
        if registered := re.search(r'^@register\("(\w+)"\)\nclass (\w+)', text, re.MULTILINE):
            title = re.match(r'"""(.*?)(?: \(|: )', text.replace("\n", " "))[1]
            module = import_module(f"megazoo.models.{path.stem}")
            found[registered[1]] = title, getattr(module, registered[2])
    return found


def family_file() -> str:
    """Return the text of megazoo/families/table.py."""
    families = {name: model for name, (_, model) in families_of_files().items()}
    text = (
        '"""The presets of each family of megazoo. `python -m tests.docs.refresh_docs` writes this '
        'file from\nmegazoo/models/."""\n\nPRESETS: dict[str, tuple[str, ...]] = {\n'
    )
    for name, model in families.items():
        text += f"    {name!r}: {tuple(model.presets)!r},\n"
    text += "}\n\n# the name of each family's class\nCLASSES = {\n"
    text += "".join(f"    {name!r}: {model.__name__!r},\n" for name, model in families.items())
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TABLE), "-"]
    done = subprocess.run(
        ruff, input=text + "}\n", capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def models_of_readme(page: str) -> str:
    """Return README.md with the titles of all families."""
    families = families_of_files()
    titles = ", ".join(title for title, _ in families.values())
    page = re.sub(r"\d+ more families", f"{len(families) - 3} more families", page)
    return re.sub(
        r"\*\*Models:\*\*.*?:\s\[sizes\]",
        lambda _: f"**Models:** {titles}: [sizes]",
        page,
        flags=re.DOTALL,
    )


def model_tables() -> str:
    """Return the table of families, and one table of presets for each family."""
    tables, columns = {}, ["layers", "hidden_size", "heads", "max_positions", "vocab_size"]
    for row in models.found(None):
        config = row["config"]
        sizes = [f"{config[name]:,}" for name in columns]
        hub = f"`{row['hub']}`" if row["hub"] else ""
        cells = [f"`{row['preset']}`", f"{row['parameters']:,}", *sizes, hub]
        tables.setdefault(row["family"], []).append(f"| {' | '.join(cells)} |\n")
    head = (
        "| preset | parameters | layers | hidden | heads | positions | vocabulary | on the hub |\n"
    )
    head += "|---|---|---|---|---|---|---|---|\n"
    presets = (f"## {name}\n\n{head}{''.join(rows)}" for name, rows in tables.items())
    return "\n".join([family_table(), *presets])


def output_table() -> str:
    """Return a table of the outputs of metrics."""
    rows = [
        f"| `{flag_of(name)} {output.metavar}` | {' '.join((output.__doc__ or '').split())} |\n"
        for name, output in OUTPUTS.items()
    ]
    return f"| flag | output |\n|---|---|\n{''.join(rows)}"


# Page, what it takes, and the marks around it.
TAKEN = {
    ROOT / "docs" / "metrics.md": (
        output_table,
        "<!-- outputs: from megazoo/trainer/outputs -->\n",
        "<!-- end of outputs -->\n",
    ),
    OPTIONS: (flag_table, BEGIN, END),
    ROOT / "docs" / "command.md": (
        command_table,
        "<!-- commands: from megazoo/commands.py -->\n",
        "<!-- end of commands -->\n",
    ),
    ROOT / "docs" / "models.md": (
        model_tables,
        "<!-- models: from megazoo models -->\n",
        "<!-- end of models -->\n",
    ),
}


def refreshed(page: Path) -> str:
    """Return the text of one of the pages above as it should be."""
    written_by, begin, end = TAKEN[page]
    before, _, rest = page.read_text().partition(begin)
    return f"{before}{begin}\n{written_by()}\n{end}{rest.partition(end)[2]}"


def gallery_rows() -> list[str]:
    """Return the lines of the gallery in docs/planted_bugs.md, without the table's head."""
    table = PLANTED.read_text().partition(GALLERY)[2].partition(END_OF_GALLERY)[0]
    return table.strip().splitlines()[2:]


def write_gallery() -> None:
    """Run the self-test of check_parallel.py, and put its table into docs/planted_bugs.md."""
    command = [sys.executable, ROOT / "tools" / "check_parallel.py", "--self-test"]
    table = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    before, _, rest = PLANTED.read_text().partition(GALLERY)
    after = rest.partition(END_OF_GALLERY)[2]
    PLANTED.write_text(f"{before}{GALLERY}\n{table}\n{END_OF_GALLERY}{after}")


def write_notebook() -> None:
    """Run the notebook, and put the outputs of its cells into it."""
    with tempfile.TemporaryDirectory() as directory:
        nbformat.write(executed(Path(directory)), NOTEBOOK)


def main() -> None:
    if TABLE.read_text() != (text := family_file()):
        TABLE.write_text(text)
        again = [sys.executable, "-W", "ignore", "-m", "tests.docs.refresh_docs", *sys.argv[1:]]
        os.execv(sys.executable, again)  # this process has imported the old ones
    for taking in TAKEN:
        taking.write_text(refreshed(taking))
    page = NEW_MODEL.read_text()
    README.write_text(models_of_readme(README.read_text()))
    NEW_MODEL.write_text(BLOCK_OF_QWEN3.sub(lambda _: QWEN3.read_text(), page, count=1))
    if "--self-test" in sys.argv[1:]:
        write_gallery()
    if "--notebook" in sys.argv[1:]:
        write_notebook()


if __name__ == "__main__":
    main()
