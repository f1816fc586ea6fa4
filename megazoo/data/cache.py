"""Cache of token files, written next to a text file when it is first used for training."""

import hashlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megazoo.data.conversations import only_template
from megazoo.data.encoding import CONVERSATION, PREFERENCE, Recipe
from megazoo.data.formats import (
    given_keys,
    is_conversation,
    keys_error,
    reader_for,
)
from megazoo.data.indexed import IndexedTokens
from megazoo.data.labels import LABELLED, Labels
from megazoo.data.preprocess import preprocess
from megazoo.data.text_files import ROW, RowReader, first_object, has_objects
from megazoo.errors import UserError
from megazoo.files import locked
from megazoo.terminal import byte_bar
from megazoo.tokenizer import open_tokenizer, tokenizer_files

TEXT = ("text",)
RULES = 3  # version of the rules that make tokens, in their names


def cached_tokens(
    path: Path,
    tokenizer: str,
    chat_template: str | None,
    labels: Labels | None = None,
    preferences: bool = False,
    rows: RowReader | None = None,
) -> list[IndexedTokens]:
    """Return the tokens of a text file; create them at the first call.

    The result has one entry per key of the recipe: the tokens of paragraphs or texts; the tokens
    and the loss mask of conversations, for preferences of both answers; or, with labels, the tokens
    of texts and of paired texts, and the labels. Without labels, the first object of a file
    determines the kind.

    The tokens are stored in FILE.tokens, under a name that depends on everything that affects them.
    If several processes of a machine call this at the same time, only one creates the files. rows:
    reads a file of another kind.

    Raises:
        UserError: An object lacks the keys of its kind or a label, conversations have no
            chat_template, or the directory is not writable.
    """
    recipe = _recipe_for(path, tokenizer, chat_template, labels, preferences, rows)
    directory = Path(f"{path}.tokens")
    prefix = directory / _name(recipe, rows)
    files = [Path(f"{prefix}_{key}_document") for key in recipe.keys]
    try:
        if not _whole(files):
            directory.mkdir(exist_ok=True)
            with locked(Path(f"{prefix}.lock")):
                if not _whole(files):  # another process may have made them meanwhile
                    with byte_bar(path.stat().st_size, "tokenize") as bar:
                        preprocess(recipe, prefix, workers=0, progress=bar.update, rows=rows)
    except OSError as error:
        raise UserError(
            f"the tokens of {path} can't be written to {directory}: {error.strerror}; "
            "use `megazoo preprocess` to write them to another directory",
            exit_code=1,
        ) from error
    return [IndexedTokens(file) for file in files]


def _recipe_for(
    path: Path,
    tokenizer: str,
    chat_template: str | None,
    labels: Labels | None,
    preferences: bool,
    rows: RowReader | None,
) -> Recipe:
    """Return the recipe for the tokens of a file; UserError if the first object of a file cannot be
    encoded."""
    if labels:
        return Recipe((str(path),), tokenizer, LABELLED, strict=True, labels=labels)
    if not rows and not has_objects(path):
        return Recipe((str(path),), tokenizer, append_eod=True, strict=True, paragraphs=True)
    place, value = first_object(path, rows)
    keys = given_keys(value)
    chats = preferences or reader_for(keys) is not None
    if not chats and "text" not in keys:
        problem = keys_error(value, json_file=not place.startswith(ROW))
        raise UserError(f"{path}, {place}: {problem}")
    of_messages = preferences and isinstance(value.get("chosen"), list)
    if chat_template is None and (of_messages or (not preferences and is_conversation(value))):
        tools = None if value.get("tools") in (None, "") else []
        only_template(open_tokenizer(tokenizer), f"the conversations of {path}", tools)
    of_examples = PREFERENCE if preferences else CONVERSATION
    keys, template = (of_examples, chat_template) if chats else (TEXT, None)
    return Recipe(
        (str(path),), tokenizer, keys, append_eod=not chats, strict=True, chat_template=template
    )


def _whole(files: list[Path]) -> bool:
    """Return whether token files are complete: their indices are written last."""
    return all(Path(f"{file}.idx").is_file() for file in files)


def _name(recipe: Recipe, rows: RowReader | None) -> str:
    """Return a name for the tokens of a recipe: a digest of the size and time of the file, the
    files of the tokenizer, the settings, and the Python file that defines `rows`."""
    status = os.stat(recipe.inputs[0])
    settings: dict[str, Any] = {
        **asdict(recipe),
        "inputs": [status.st_size, status.st_mtime_ns],
        "tokenizer": "",
    }
    for name in (
        "labels",
        "paragraphs",
    ):  # omitted if unused, so that names of older files remain valid
        if not settings[name]:
            del settings[name]
    settings["rules"] = RULES
    module = sys.modules.get(rows.__module__) if rows else None
    if code := getattr(module, "__file__", None):  # None in a notebook
        settings["rows"] = hashlib.sha256(Path(code).read_bytes()).hexdigest()
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=8)
    for name, data in sorted(tokenizer_files(recipe.tokenizer, templates=True).items()):
        digest.update(hashlib.blake2b(data, person=name.encode()[:16]).digest())
    return digest.hexdigest()
