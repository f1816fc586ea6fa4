"""Completes tokenizer_config.json for directories that lack the original config.json, such as
checkpoints."""

import json
from collections.abc import Mapping
from pathlib import Path

from megazoo.errors import UserError
from megazoo.files import json_object, read_bytes
from megazoo.sidecars import GENERATION, SIDECAR_FILES, TOKENIZER_FILES, template_files_in
from megazoo.tokenizer.classes import class_of
from megazoo.tokenizer.hugging_face import GPT2_CLASSES
from megazoo.tokenizer.ranks import LINE
from megazoo.tokenizer.sentence_piece import CLASSES
from megazoo.tokenizer.settings import CONFIG, ROLES, TokenizerSettings, ids_in, read_settings


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory contains tokenizer files."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def sidecar_files_in(directory: Path) -> dict[str, bytes]:
    """Return the contents of a model's sidecar files by name, including those of
    additional_chat_templates.

    The tokenizer_config.json also holds what only config.json says about the tokenizer.
    """
    names = (*SIDECAR_FILES, *template_files_in(directory))
    files = {name: read_bytes(directory / name) for name in names if (directory / name).is_file()}
    return with_whole_config(directory, files) if has_tokenizer(directory) else files


def with_whole_config(directory: Path, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Add what only config.json or generation_config.json says to tokenizer_config.json: the class
    of the tokenizer, and the ids of special tokens without a name.

    The ids stay ids, because a chat template is rendered only with the tokens that have a name.
    Files that already say everything, or that can't be read, remain as they are.

    Args:
        directory: The directory of the files, with its config.json.
        files: The contents of the files that are taken along, by name.
    """
    try:
        settings = read_settings(directory)
        kept = json_object(directory / GENERATION, files.get(GENERATION, b"{}"))
    except UserError:
        return dict(files)
    more = _class(settings, files)
    declared = settings.config.get("tokenizer_class") or more.get("tokenizer_class")
    kept_ids = {role: i for role, i in ids_in(kept).items() if role != "bos" or not declared}
    for role in ROLES:
        token = settings.unnamed_id(role)
        if token is not None and token != (kept_ids | ids_in(settings.config)).get(role):
            more[f"{role}_token_id"] = token
    if not more:
        return dict(files)
    return {**files, CONFIG: (json.dumps(settings.config | more, indent=2) + "\n").encode()}


def _class(settings: TokenizerSettings, files: Mapping[str, bytes]) -> dict:
    """Return the keys that give the tokenizer its class without config.json."""
    alone = settings.config.get("tokenizer_class")
    if (data := files.get("tokenizer.json")) is not None:
        settings.read_tokenizer_json(data, {})
        found = settings.tokenizer_class
        same = found == class_of(alone, None, bool(settings.byte_level))
        return {} if same else {"tokenizer_class": found}
    # The readers of these files accept few classes, and treat one that no file names differently.
    more = {}
    data = files.get("tokenizer.model")
    supported = GPT2_CLASSES if data is None else CLASSES
    if not alone and (settings.declared in supported or (data and LINE.match(data))):
        more["tokenizer_class"] = settings.declared
    if data is None:
        settings.declared = settings.declared or GPT2_CLASSES[0]
    of_model = class_of(settings.declared, settings.model_type, False)
    if of_model != class_of(settings.declared, None, False):
        more["model_type"] = settings.model_type
    return {key: value for key, value in more.items() if value != settings.config.get(key)}
