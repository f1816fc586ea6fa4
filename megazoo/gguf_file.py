"""Reads GGUF, the format of llama.cpp, with the package `gguf`.

A model's metadata, tokenizer and tensors are in one file, or in several numbered files.
"""

import re
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from megazoo.errors import UserError
from megazoo.files import regular_file
from megazoo.lazy import is_installed

if TYPE_CHECKING:
    import gguf

MAGIC = b"GGUF"
PART = re.compile(r"(?P<start>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GGUF(NamedTuple):
    """The contents of a model's files.

    metadata: values by key, such as "llama.block_count". tensors: tensors by their names in the
    file, such as "blk.0.attn_q.weight". files: by the same names, the file that holds each tensor.
    """

    metadata: dict[str, Any]
    tensors: "dict[str, gguf.ReaderTensor]"
    files: dict[str, str]


def library() -> ModuleType:
    """Return the package `gguf`. UserError if it is not installed."""
    if not is_installed("gguf"):
        raise UserError(
            "GGUF files need the package gguf; in the clone of megazoo: pip install -e '.[gguf]'"
        )
    return import_module("gguf")


def is_gguf(path: Path) -> bool:
    """Return whether the first bytes of a file are those of GGUF."""
    try:
        with open(regular_file(path), "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, UserError):
        return False


def read_gguf(path: Path) -> GGUF:
    """Read the metadata of a GGUF model, and map its tensors into memory.

    Each file is parsed once per process: the package needs 7 s for a vocabulary of 150,000 tokens.

    Args:
        path: the file, or any of the numbered files of a model.

    Raises:
        UserError: if a file is missing or corrupt.
    """
    names, metadata, tensors, files = names_of_parts(path), {}, {}, {}
    for name in names:
        file = path.with_name(name)
        if not file.is_file():
            raise UserError(f"{file} is missing: the model of {path} has {len(names)} files")
        status = file.stat()
        values, there = _parsed(file.absolute(), status.st_size, status.st_mtime_ns)
        metadata = values | metadata  # the first file describes the model
        tensors |= there
        files |= dict.fromkeys(there, name)
    return GGUF(metadata, tensors, files)


def names_of_parts(path: Path) -> list[str]:
    """Return the names of all files of the model that `path` belongs to."""
    if part := PART.fullmatch(path.name):
        numbers = range(1, int(part["count"]) + 1)
        return [f"{part['start']}-{number:05d}-of-{part['count']}.gguf" for number in numbers]
    return [path.name]


@lru_cache(maxsize=16)
def _parsed(path: Path, size: int, modified: int) -> "tuple[dict, dict[str, gguf.ReaderTensor]]":
    """Parse one file. size, modified: of the file, so that a changed file is parsed again."""
    gguf = library()
    try:
        reader = gguf.GGUFReader(path)
        if reader.byte_order == "S":
            raise UserError(f"{path} is not supported: it is big-endian", exit_code=1)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        return metadata, {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, KeyError, IndexError, OSError, OverflowError, MemoryError) as error:
        reason = str(error).splitlines() or [type(error).__name__]
        raise UserError(f"{path} is not a complete GGUF file: {reason[0]}", exit_code=1) from error
