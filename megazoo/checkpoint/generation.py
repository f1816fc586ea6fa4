"""Reads generation_config.json, and checks its token ids."""

from pathlib import Path

from megazoo.errors import UserError
from megazoo.files import json_object

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MOST = 1 << 31


def generation_config(path: Path, data: bytes) -> dict:
    """Return the values of a generation_config.json; UserError with the file's name if a token id
    is not a number. data: the bytes of the file."""
    return with_token_ids(path, json_object(path, data))


def with_token_ids(path: Path, values: dict) -> dict:
    """Return the values of a JSON file after a check of their token ids: each must be a number,
    null, or for eos also a list of numbers. UserError otherwise."""
    for name in TOKEN_IDS:
        value = values.get(name)
        ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
        if value is not None and not all(type(each) is int and abs(each) < MOST for each in ids):
            raise UserError(f"{path}: {name} {value!r} is not a token id")
    return values
