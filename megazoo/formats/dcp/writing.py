"""Write the files of a checkpoint of torch.distributed.checkpoint: chunks of tensors, and the
metadata that locates them."""

import io
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from zlib_ng.zlib_ng import crc32

from megazoo.checkpoint.directories import stamp
from megazoo.checkpoint.ownership import DCP_HEADER
from megazoo.checkpoint.places import DCP_METADATA
from megazoo.checkpoint.writing import (
    LazyTensor,
    check_finite,
    pieces_of_tensor,
    sync,
    write_atomically,
)
from megazoo.torch_internals import stored_in_file

ALIGNMENT = 64  # bytes: of each chunk in its file


class Block(NamedTuple):
    """A box of a tensor to write, under one or several keys.

    shape: of the tensor. start: of the box. values: of the box. They may lack the first dimension
    of the tensor, in which the box then has length 1.
    """

    keys: list[str]
    shape: tuple[int, ...]
    start: tuple[int, ...]
    values: torch.Tensor | LazyTensor


class Value(NamedTuple):
    """A value to write completely, under one or several keys: a tensor with one number, or a
    setting of the optimizer."""

    keys: list[str]
    value: Any


class Stored(NamedTuple):
    """Where a chunk of a tensor, or a setting, was written. dtype: None for a setting."""

    key: str
    file: str
    offset: int
    length: int
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    size: tuple[int, ...] = ()


def write_chunks(path: Path, blocks: Iterable[Block], values: Iterable[Value]) -> dict:
    """Write a file of chunks, each of a few megabytes. When the call returns, it is on the disk.

    Returns the "files", "stamps" and "tensors" of the file: see `write_rank` of shards. Raises
    UserError, with its name, for a tensor that is not finite.
    """
    stored: list[Stored] = []
    with open(path, "xb") as opened:
        file = _Summed(opened)
        file.write(DCP_HEADER)

        def write(keys: list[str], value: Any, **where: Any) -> None:
            offset = file.size
            saved = io.BytesIO()  # torch would hide an error of the disk
            torch.save(value, saved)
            file.write(saved.getbuffer())
            length = file.size - offset
            file.write(bytes(-length % ALIGNMENT))
            stored.extend(Stored(key, path.name, offset, length, **where) for key in keys)

        for block in blocks:
            lead = len(block.shape) - len(block.values.shape)
            (*matrix, row), columns = block.start[: lead + 1], block.start[lead + 1 :]
            for piece in pieces_of_tensor(block.values):
                check_finite(block.keys[0], piece)
                chunk = piece.clone().view((1,) * lead + piece.shape)  # torch.save writes storages
                where = {"start": (*matrix, row, *columns), "size": tuple(chunk.shape)}
                write(block.keys, chunk, dtype=chunk.dtype, shape=block.shape, **where)
                row += len(piece)
        for keys, value in values:
            write(keys, value, dtype=value.dtype if isinstance(value, torch.Tensor) else None)
        opened.flush()
        sync(opened.fileno())
    info = {"size": file.size, "crc32": file.crc32}
    return {"files": {path.name: info}, "stamps": {path.name: stamp(path)}, "tensors": stored}


class _Summed:
    """Writes to a file, and computes its size and checksum."""

    def __init__(self, file: BinaryIO):
        self.file, self.size, self.crc32 = file, 0, 0

    def write(self, data: bytes | memoryview) -> None:
        self.size, self.crc32 = self.size + len(data), crc32(data, self.crc32)
        self.file.write(data)


def write_metadata(
    directory: Path, stored: Iterable[Stored], path_of: Callable[[str], tuple[str | int, ...]]
) -> None:
    """Write the metadata, which makes a checkpoint complete.

    stored: the chunks of all files. path_of: returns the place of a key in nested dictionaries.
    """
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, Any] = {}
    places = {}
    for each in stored:
        index = MetadataIndex(each.key)
        if each.dtype is None:
            entries[each.key] = BytesStorageMetadata()
        else:
            properties, shape = TensorProperties(dtype=each.dtype), torch.Size(each.shape)
            new = TensorStorageMetadata(properties, shape, [])
            chunks = entries.setdefault(each.key, new).chunks
            index = MetadataIndex(each.key, each.start, len(chunks))
            chunks.append(ChunkStorageMetadata(torch.Size(each.start), torch.Size(each.size)))
        places[index] = stored_in_file(each.file, each.offset, each.length)
    planner = {key: path_of(key) for key in entries}
    metadata = Metadata(entries, planner, places, version="1.0.0")
    write_atomically(directory / DCP_METADATA, pickle.dumps(metadata))
