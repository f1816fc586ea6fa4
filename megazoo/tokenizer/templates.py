"""Chat templates in the files of a tokenizer, as transformers stores them: chat_template.jinja,
additional_chat_templates/NAME.jinja, and chat_template in tokenizer_config.json."""

from collections.abc import Mapping
from pathlib import Path

from megazoo.errors import UserError
from megazoo.files import brief, json_object, malformed, read_bytes
from megazoo.sidecars import (
    CHAT_TEMPLATE,
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    TEMPLATE_NAME,
    template_files_in,
)

DEFAULT = "default"


def chat_templates_in(directory: Path, config: Mapping = {}) -> dict[str, str]:
    """Return the chat templates of a directory by name. The only template is named "default".

    Args:
        directory: The directory of the files.
        config: Contents of tokenizer_config.json. Its templates are used if the directory lacks
            .jinja files.

    Raises:
        UserError: A file is malformed.
    """
    names = template_files_in(directory)
    found = {}
    for name in [CHAT_TEMPLATE, *names] if (directory / CHAT_TEMPLATE).exists() else names:
        with malformed(directory / name):
            found[_name_of(name)] = read_bytes(directory / name).decode()
    with malformed(directory / "tokenizer_config.json"):
        return found or _templates_of(config)


def with_template(
    files: Mapping[str, bytes], template: str, *, only: bool = False
) -> dict[str, bytes]:
    """Replace the default chat template in the files of a tokenizer.

    A chat_template.jinja hides all templates of tokenizer_config.json, so the other ones become
    files in additional_chat_templates.

    Args:
        files: The contents of the files, by name.
        template: The Jinja template.
        only: The result has no other templates, such as tool_use.

    Raises:
        UserError: The name of a template can't be the name of a file.
    """
    config, others = "tokenizer_config.json", {}
    if only:
        rest = {name: data for name, data in files.items() if not _is_template(name)}
        return rest | {CHAT_TEMPLATE: template.encode()}
    if config in files and not any(map(_is_template, files)):
        with malformed(Path(config)):
            others = _templates_of(json_object(Path(config), files[config]))
            others.pop(DEFAULT, None)
            for name in others:
                if not TEMPLATE_NAME.fullmatch(name):
                    raise UserError(
                        f"the chat template {brief(name)} can't become a file: use a name of "
                        "letters, digits, _ and -"
                    )
    named = {f"{TEMPLATE_FOLDER}/{name}.jinja": text.encode() for name, text in others.items()}
    changed = {**files, **named, CHAT_TEMPLATE: template.encode()}
    # transformers would use it instead of chat_template.jinja
    changed.pop(f"{TEMPLATE_FOLDER}/{DEFAULT}.jinja", None)
    return changed


def _is_template(name: str) -> bool:
    return name == CHAT_TEMPLATE or bool(TEMPLATE_FILE.fullmatch(name))


def _name_of(file: str) -> str:
    return DEFAULT if file == CHAT_TEMPLATE else Path(file).stem


def _templates_of(config: Mapping) -> dict[str, str]:
    """Return the chat templates of tokenizer_config.json: a text, an object of texts by name, or a
    list of objects with name and template."""
    value = config.get("chat_template")
    if isinstance(value, list):
        value = {entry["name"]: entry["template"] for entry in value}
    elif not isinstance(value, dict):
        value = {} if value is None else {DEFAULT: value}
    for name, template in value.items():
        if not isinstance(name, str) or not isinstance(template, str):
            raise UserError(
                f"chat_template has {brief(template)} under the name {brief(name)}: it must be a "
                "text"
            )
        template.encode()  # raises ValueError for lone surrogates
    return value
