"""The names of the small files in the directory of a model's weights."""

import re
from pathlib import Path

GENERATION = "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them is enough
SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_SIDECARS = ("merges.txt", *SETTINGS_FILES)  # optional, in the same directory
CHAT_TEMPLATE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
# The only names with a slash among the files of a model.
TEMPLATE_FILE = re.compile(rf"{TEMPLATE_FOLDER}/{TEMPLATE_NAME.pattern}\.jinja")
# The files that are saved with the weights, so that the model can be used without its source.
SIDECAR_FILES = (GENERATION, *TOKENIZER_FILES, *TOKENIZER_SIDECARS, CHAT_TEMPLATE)


def is_sidecar(name: str) -> bool:
    """Return whether a file of this name is saved with the weights."""
    return name in SIDECAR_FILES or bool(TEMPLATE_FILE.fullmatch(name))


def template_files_in(directory: Path) -> list[str]:
    """Return the names of the files in additional_chat_templates, such as
    additional_chat_templates/tool_use.jinja. Other names than letters, digits, _ and - are
    skipped."""
    folder = directory / TEMPLATE_FOLDER
    names = (f"{TEMPLATE_FOLDER}/{path.name}" for path in sorted(folder.glob("*.jinja")))
    return [
        name for name in names if TEMPLATE_FILE.fullmatch(name) and (directory / name).is_file()
    ]
