"""Read the metadata of a checkpoint of torch.distributed.checkpoint: the chunks of its tensors.

.metadata        names and shapes of all tensors, and the location of each chunk
__R_N.distcp     chunks, each written by torch.save, one after the other
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from megazoo.checkpoint.places import DCP_METADATA
from megazoo.errors import UserError
from megazoo.files import brief
from megazoo.formats.dcp.tensors import Chunk
from megazoo.formats.dcp.torch_files import load_pickle, load_torch
from megazoo.formats.dcp.unpickling import StandIn, StoredTensor
from megazoo.parallel.shard import Piece

DATA = "*.distcp"
OF_MEGATRON = ("common.pt", "metadata.json")  # files that Megatron-LM adds


class Entry(NamedTuple):
    """A tensor in the metadata: its shape, and its chunks, which need not cover all of it."""

    shape: tuple[int, ...]
    chunks: list[Chunk]


def is_distributed(directory: Path) -> bool:
    """Return whether a directory is a checkpoint of torch.distributed.checkpoint, and not one of
    Megatron-LM."""
    there = (directory / DCP_METADATA).is_file() or any(directory.glob(DATA))
    return there and not any((directory / name).is_file() for name in OF_MEGATRON)


@dataclass
class Place:
    """The place of a chunk: the part of a file that torch.save wrote. Calling it returns the
    location of the elements; the first call opens the file."""

    path: Path
    key: str
    start: int
    length: int
    size: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self) -> StoredTensor:
        return self._stored

    @cached_property
    def _stored(self) -> StoredTensor:
        tensor = load_torch(self.path, self.start, self.length)
        expected = self.size, self.dtype
        if not isinstance(tensor, StoredTensor) or (tensor.shape, tensor.dtype) != expected:
            raise UserError(f"{self.path}: {self.key} does not match {DCP_METADATA}", exit_code=1)
        return tensor


def read_metadata(directory: Path, wanted: Callable[[str], bool]) -> dict[str, Entry | None]:
    """Return the entries of a checkpoint by key; None for an entry that is not a tensor.

    wanted: whether an entry is read. Each chunk is in a file that is large enough for it. Only
    metadata is read. Raises UserError for broken files, and for files outside the directory.
    """
    file = directory / DCP_METADATA
    if not file.is_file():
        raise UserError(
            f"{directory} has no {DCP_METADATA}, which torch.distributed.checkpoint writes last: "
            "the save was interrupted; use another checkpoint"
        )
    metadata = load_pickle(file)
    try:
        return _entries(directory, metadata, wanted)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, UserError):
            raise
        reason = str(error) if type(error) is ValueError else brief(repr(error))
        raise UserError(f"{file} can't be read: {reason}") from error


def _entries(directory: Path, metadata: StandIn, wanted) -> dict[str, Entry | None]:
    places = {
        (index.state["fqn"], _sizes(index.state["offset"])): info.state
        for index, info in metadata.state["storage_data"].items()
        if index.state.get("offset") is not None
    }
    sizes = cache(lambda name: _size_of(directory, name))
    entries: dict[str, Entry | None] = {}
    for key, about in metadata.state["state_dict_metadata"].items():
        if not isinstance(key, str) or len(key) > 1000 or not key.isprintable():
            raise ValueError(f"{brief(key)} can't be the name of a tensor")
        if not wanted(key):
            continue
        if not about.state:  # bytes
            entries[key] = None
            continue
        (dtype, *_), chunks = about.state["properties"].state, []
        shape = _sizes(about.state["size"])
        for chunk in about.state["chunks"]:
            start, size = _sizes(chunk.state["offsets"]), _sizes(chunk.state["sizes"])
            if (info := places.get((key, start))) is None:
                raise UserError(
                    f"{directory / DCP_METADATA} does not say where the piece of {key} at "
                    f"{list(start)} is: use another checkpoint"
                )
            stored = _place_of(directory, key, info, size, dtype, sizes)
            box = tuple((at, at + count) for at, count in zip(start, size, strict=True))
            if any(stop > limit for (_, stop), limit in zip(box, shape, strict=True)):
                raise ValueError(f"a chunk of {key} reaches beyond the tensor")
            chunks.append(Chunk(Piece(box, (0,) * len(box)), dtype, stored.path, stored))
        if not chunks:
            raise ValueError(f"{key} has no chunks")
        entries[key] = Entry(shape, chunks)
    return entries


def _sizes(values) -> tuple[int, ...]:
    """Return a shape or an offset, with its numbers checked."""
    sizes = tuple(values)
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
        raise ValueError("a shape or an offset has a number out of range")
    return sizes


def _place_of(directory, key, info: dict, size: tuple, dtype: torch.dtype, sizes) -> Place:
    """Return the place of a chunk. Raises UserError if its file can't contain it."""
    file, (start, length) = info["relative_path"], _sizes((info["offset"], info["length"]))
    path = directory / file
    if Path(file).name != file or file in ("", "..") or not file.isprintable():
        raise UserError(
            f"{directory / DCP_METADATA} names a file outside its directory: {brief(file)}"
        )
    if info.get("transform_descriptors"):
        raise UserError(f"{path}: {key} is compressed or encrypted, which is not supported")
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"{path}: {key} is of an unknown dtype")
    if start + length > sizes(file):
        raise UserError(f"{path} has {sizes(file)} bytes, but should have {start + length}")
    if math.prod(size) * dtype.itemsize > length:
        raise UserError(f"{path}: {length} bytes can't hold {list(size)} of {key}")
    return Place(path, key, start, length, size, dtype)


def _size_of(directory: Path, file: str) -> int:
    try:
        return (directory / file).stat().st_size
    except OSError:
        raise UserError(f"{directory / file} is missing") from None
