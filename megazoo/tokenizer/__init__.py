"""Tokenizers convert text to token ids and back. They are opened from local files, whose contents
decide the kind of tokenizer. Other files of the directory are not needed."""

import json
import tempfile
from pathlib import Path

from megazoo.errors import UserError
from megazoo.files import json_object, read_bytes
from megazoo.gguf_file import is_gguf, read_gguf
from megazoo.hub import local_directory
from megazoo.sidecars import CHAT_TEMPLATE, TOKENIZER_FILES, TOKENIZER_SIDECARS, template_files_in
from megazoo.tokenizer.base import EncodedBatch, Stream, Tokenizer
from megazoo.tokenizer.byte import ByteTokenizer
from megazoo.tokenizer.complete import has_tokenizer, sidecar_files_in, with_whole_config
from megazoo.tokenizer.gguf import has_vocabulary, tokenizer_files_of
from megazoo.tokenizer.hugging_face import (
    from_tokenizer_json,
    from_vocab_and_merges,
    use_prefix_of_class,
)
from megazoo.tokenizer.pipeline import from_pipeline
from megazoo.tokenizer.ranks import LINE, from_ranks
from megazoo.tokenizer.sentence_piece import from_sentencepiece
from megazoo.tokenizer.settings import TokenizerSettings, read_settings

__all__ = [
    "ByteTokenizer",
    "EncodedBatch",
    "Stream",
    "Tokenizer",
    "has_tokenizer",
    "open_tokenizer",
    "sidecar_files_in",
    "tokenizer_files",
]


def open_tokenizer(where: str | Path) -> Tokenizer:
    """Open a tokenizer.

    Supported files are tokenizer.json, vocab.json with merges.txt next to it, and tokenizer.model
    (of sentencepiece or LLaMA-3). JSON files in the same directory name the special tokens. A GGUF
    file contains everything.

    Args:
        where: "byte", a directory with tokenizer files, a single tokenizer file, or
            org/name[@revision] on the Hugging Face hub.

    Raises:
        UserError: A file is missing, malformed or not supported.
    """
    if str(where) == "byte":
        return ByteTokenizer()
    if is_gguf(Path(where)):
        with tempfile.TemporaryDirectory() as beside:
            for name, data in tokenizer_files(where).items():
                Path(beside, name).parent.mkdir(exist_ok=True)
                Path(beside, name).write_bytes(data)
            tokenizer = open_tokenizer(beside)
        tokenizer.source = str(where)
        return tokenizer
    directory, files = _located(where)
    settings = read_settings(directory)
    tokenizer = _from_file(files[0], settings)
    tokenizer.source = str(where)
    return tokenizer


def tokenizer_files(where: str | Path, *, templates: bool = False) -> dict[str, bytes]:
    """Read the files of a tokenizer.

    Args:
        where: As in `open_tokenizer`.
        templates: Include the .jinja files of chat templates. A GGUF file always includes them.

    Returns:
        The contents of the files, by the names that they have in a model's directory. The
            tokenizer_config.json also holds what only the config.json next to it says. Empty for
            "byte".
    """
    if str(where) == "byte":
        return {}
    if is_gguf(path := Path(where)):
        metadata = read_gguf(path).metadata
        if not has_vocabulary(metadata):
            raise UserError(f"{path} has no tokenizer")
        try:
            return tokenizer_files_of(metadata)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    directory, files = _located(where)
    contents = {path.name: read_bytes(path) for path in files}
    if Path(where).is_file():
        ((_, data),) = contents.items()
        contents = {_usual_name(files[0], data): data}
    jinja = (CHAT_TEMPLATE, *template_files_in(directory)) if templates else ()
    contents |= {
        name: read_bytes(directory / name)
        for name in (*TOKENIZER_SIDECARS, *jinja)
        if (directory / name).is_file()
    }
    return with_whole_config(directory, contents)


def _located(where: str | Path) -> tuple[Path, list[Path]]:
    """Return a tokenizer's directory and the TOKENIZER_FILES in it. For a single file, return its
    directory and the file."""
    path = local_directory(where, tokenizer_alone=True)
    if path.is_file():
        return path.parent, [path]
    if not path.is_dir():
        raise UserError(
            f"unknown tokenizer {str(where)!r}: use byte, or the directory or file of a tokenizer"
        )
    files = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
    if not files:
        raise UserError(f"{path} has no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
    return path, files


def _usual_name(path: Path, data: bytes) -> str:
    """Return the name that a tokenizer file has in a model's directory, based on its contents."""
    if LINE.match(data) or not _is_json(data):
        return "tokenizer.model"
    return "vocab.json" if _is_vocabulary(json_object(path, data)) else "tokenizer.json"


def _is_json(data: bytes) -> bool:
    return data.lstrip().startswith(b"{")


def _is_vocabulary(entries: dict) -> bool:
    return any(isinstance(value, int) for value in entries.values())


def _from_file(path: Path, settings: TokenizerSettings) -> Tokenizer:
    data = read_bytes(path)
    if LINE.match(data):
        return from_ranks(path, data, settings)
    if not _is_json(data):
        return from_sentencepiece(path, data, settings)
    entries = json_object(path, data)
    if _is_vocabulary(entries):
        return from_vocab_and_merges(path, entries, settings)
    settings.read_tokenizer_json(data, entries)
    if use_prefix_of_class(entries, settings):
        data = json.dumps(entries).encode()
    try:
        return from_tokenizer_json(path, entries, settings)  # much faster than from_pipeline
    except UserError:
        return from_pipeline(path, data, entries, settings)
