"""The ids of tokens that a generation_config.json names."""

from pathlib import Path

from megazoo.errors import UserError
from megazoo.files import json_object

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MOST = 1 << 31


def generation_config(path: Path, data: bytes) -> dict:
    """Return what a generation_config.json, of these bytes, says; UserError, naming the file, if a
    token's id is no number."""
    return with_token_ids(path, json_object(path, data))


def with_token_ids(path: Path, values: dict) -> dict:
    """Return the values that a JSON file has, if the ids of tokens among them are ids: a number, a
    list of numbers for eos, or null. UserError names the file and the field otherwise."""
    for name in TOKEN_IDS:
        value = values.get(name)
        ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
        if value is not None and not all(type(each) is int and abs(each) < MOST for each in ids):
            raise UserError(f"{path}: {name} {value!r} is not the id of a token")
    return values
