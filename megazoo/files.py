"""Small files that are read whole."""

import json
from pathlib import Path

from megazoo.errors import UserError


def json_object(path: Path, data: bytes) -> dict:
    """The object that a JSON file holds; UserError, naming it, if there is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object")
    return value
