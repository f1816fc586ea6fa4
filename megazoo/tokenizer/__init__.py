"""Tokenizers: what turns text into token ids and back. From local files, told apart by what is in them."""

from contextlib import suppress
from pathlib import Path

from megazoo.errors import UserError
from megazoo.files import json_object
from megazoo.tokenizer.base import EncodedBatch, Stream, Tokenizer
from megazoo.tokenizer.byte import ByteTokenizer
from megazoo.tokenizer.hugging_face import Unsupported, from_tokenizer_json, from_vocab_and_merges
from megazoo.tokenizer.ranks import LINE, from_ranks
from megazoo.tokenizer.sentence_piece import from_sentencepiece
from megazoo.tokenizer.settings import Settings, read_bytes, read_settings

__all__ = ["ByteTokenizer", "EncodedBatch", "Stream", "Tokenizer", "open_tokenizer"]

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def open_tokenizer(where: str | Path) -> Tokenizer:
    """The tokenizer "byte", or that of a directory (Hugging Face's, or a checkpoint of ours), or of a file in one.

    Files: tokenizer.json, vocab.json with merges.txt beside it, or tokenizer.model, sentencepiece's or LLaMA-3's. The
    JSON files beside them say which tokens are special. Raises UserError for what is missing, malformed or not
    supported.
    """
    if str(where) == "byte":
        return ByteTokenizer()
    path = Path(where)
    if path.is_file():
        return _from_file(path, read_settings(path.parent))
    if not path.is_dir():
        raise UserError(f"unknown tokenizer {str(where)!r}: there is byte, or the directory or file of a tokenizer")
    if not any((path / name).is_file() for name in FILES):
        from megazoo.checkpoint.format import NoCheckpoint, find_checkpoint  # with torch: only for checkpoints

        with suppress(NoCheckpoint):
            path = find_checkpoint(path)
    files = [path / name for name in FILES if (path / name).is_file()]
    if not files:
        raise UserError(f"{path} has no tokenizer: none of {', '.join(FILES)}")
    settings = read_settings(path)
    try:
        return _from_file(files[0], settings)
    except Unsupported:
        if path / "tokenizer.model" not in files[1:]:
            raise
    return _from_file(path / "tokenizer.model", settings)  # LLaMA-2's tokenizer.json is not byte-level BPE


def _from_file(path: Path, settings: Settings) -> Tokenizer:
    data = read_bytes(path)
    if LINE.match(data):
        return from_ranks(path, data, settings)
    if not data.lstrip().startswith(b"{"):
        return from_sentencepiece(path, data, settings)
    entries = json_object(path, data)
    if any(isinstance(value, int) for value in entries.values()):
        return from_vocab_and_merges(path, entries, settings)
    return from_tokenizer_json(path, entries, settings)
