"""Tokenizers: what turns text into token ids."""

from megazoo.errors import UserError
from megazoo.tokenizer.byte import ByteTokenizer

__all__ = ["ByteTokenizer", "open_tokenizer"]


def open_tokenizer(name: str) -> ByteTokenizer:
    """The tokenizer called `name`: "byte"."""
    if name != "byte":
        raise UserError(f"unknown tokenizer {name!r}: there is byte")
    return ByteTokenizer()
