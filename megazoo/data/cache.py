"""Token files are made from a file of text when it is first trained on, and kept beside it."""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megazoo.data.encoding import CONVERSATION, Recipe
from megazoo.data.indexed import IndexedTokens
from megazoo.data.labels import LABELLED, Labels
from megazoo.data.preprocess import preprocess
from megazoo.data.text_files import first_object, is_loose_json
from megazoo.errors import UserError
from megazoo.files import locked
from megazoo.terminal import byte_bar
from megazoo.tokenizer import tokenizer_files

TEXT = ("text",)


def cached_tokens(
    path: Path, tokenizer: str, chat_template: str, labels: Labels | None = None
) -> list[IndexedTokens]:
    """Return the tokens of a file: of the paragraphs of plain text; or of JSONL, of its texts; or
    of its conversations, and the mask of what carries a loss in them; or, with labels, of its
    texts, of those that are paired with them, and of the labels: see `Recipe`.

    Without labels the first line of JSONL says which. They are made at the first call, and kept in
    FILE.tokens, under a name that everything they depend on goes into. However many processes of a
    machine call this at the same time, one of them makes the files. Raises UserError for a line
    without what the first one has, or without a label, and if nothing can be written there.
    """
    recipe = _recipe_for(path, tokenizer, chat_template, labels)
    directory = Path(f"{path}.tokens")
    prefix = directory / _name(recipe)
    files = [Path(f"{prefix}_{key}_document") for key in recipe.keys]
    try:
        if not _whole(files):
            directory.mkdir(exist_ok=True)
            with locked(Path(f"{prefix}.lock")):
                if not _whole(files):  # another process may have made them meanwhile
                    with byte_bar(path.stat().st_size, "tokenize") as bar:
                        preprocess(recipe, prefix, workers=0, progress=bar.update)
    except OSError as error:
        raise UserError(
            f"the tokens of {path} can't be kept beside it, in {directory}: {error.strerror}; "
            "`megazoo preprocess` writes them elsewhere",
            exit_code=1,
        ) from error
    return [IndexedTokens(file) for file in files]


def _recipe_for(path: Path, tokenizer: str, chat_template: str, labels: Labels | None) -> Recipe:
    """Return what the tokens of a file are made by; UserError if the first line of JSONL has
    nothing to encode."""
    if labels:
        return Recipe((str(path),), tokenizer, LABELLED, strict=True, labels=labels)
    if not is_loose_json(path):
        return Recipe((str(path),), tokenizer, append_eod=True, strict=True, paragraphs=True)
    line, value = first_object(path)
    chats = "messages" in value or {"prompt", "completion"} <= value.keys()
    if not chats and "text" not in value:
        raise UserError(
            f"{path}, line {line}: it has neither text, nor prompt and completion, nor messages"
        )
    keys, template = (CONVERSATION, chat_template) if chats else (TEXT, None)
    return Recipe(
        (str(path),), tokenizer, keys, append_eod=not chats, strict=True, chat_template=template
    )


def _whole(files: list[Path]) -> bool:
    """Return whether token files are there: their indices are written last."""
    return all(Path(f"{file}.idx").is_file() for file in files)


def _name(recipe: Recipe) -> str:
    """Return a name for the tokens of a recipe, a digest of the file's size and time, the
    tokenizer's files and the settings."""
    status = os.stat(recipe.inputs[0])
    settings: dict[str, Any] = {
        **asdict(recipe),
        "inputs": [status.st_size, status.st_mtime_ns],
        "tokenizer": "",
    }
    for name in ("labels", "paragraphs"):  # of other data: no part of names that are there already
        if not settings[name]:
            del settings[name]
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=8)
    for name, data in sorted(tokenizer_files(recipe.tokenizer).items()):
        digest.update(hashlib.blake2b(data, person=name.encode()[:16]).digest())
    return digest.hexdigest()
