"""Read Megatron-LM's format torch_dist: chunks of tensors, stored under the names of the whole
tensors.

metadata.json    {"sharded_backend": "torch_dist", ...}
common.pt        data common to all ranks: the arguments, the iteration ...
.metadata        names and shapes of all tensors, and the location of each chunk
__R_N.distcp     chunks, each written by torch.save, one after the other
"""

import math
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from megazoo.errors import UserError
from megazoo.files import json_object, read_bytes
from megazoo.formats.megatron.names import bare_name, is_state
from megazoo.formats.megatron.tensors import Chunk, Whole, whole_of
from megazoo.formats.megatron.torch_files import load_pickle, load_torch
from megazoo.formats.megatron.unpickling import StandIn, StoredTensor
from megazoo.parallel.shard import Piece

METADATA, COMMON, ABOUT = ".metadata", "common.pt", "metadata.json"
# Names for homogeneous layers: one tensor has the weights of all layers, stacked.
STACKED = re.compile(r"(.*\blayers)\.(?!\d)(.+)")


def read_distributed(directory: Path) -> tuple[Any, dict[str, Whole]]:
    """Return the arguments of a torch_dist checkpoint, and its tensors by Megatron's names with
    layer numbers. Only metadata is read. Raises UserError for broken files."""
    file = directory / ABOUT
    about = json_object(file, read_bytes(file)) if file.is_file() else {}
    if (backend := about.get("sharded_backend", "torch_dist")) != "torch_dist":
        raise UserError(
            f"{directory} has the format {backend!r}, which is not supported: use "
            "torch_dist or torch"
        )
    if not (directory / COMMON).is_file():
        raise UserError(
            f"{directory} has no {COMMON}, which describes a model of Megatron-LM; other "
            "checkpoints of torch.distributed.checkpoint are not supported"
        )
    common = load_torch(directory / COMMON)
    arguments = common.get("args") if isinstance(common, dict) else None
    try:
        return arguments, _tensors(directory, load_pickle(directory / METADATA))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{directory / METADATA} can't be read: {error!r}") from error


def _tensors(directory: Path, metadata: StandIn) -> dict[str, Whole]:
    places = {
        (index.state["fqn"], tuple(index.state["offset"])): info.state
        for index, info in metadata.state["storage_data"].items()
        if index.state.get("offset") is not None
    }
    sizes, tensors = cache(lambda name: _size_of(directory, name)), {}
    for key, about in metadata.state["state_dict_metadata"].items():
        name = bare_name(key)
        if is_state(name):
            continue
        if not about.state:  # bytes, not a tensor
            raise UserError(
                f"{directory} stores {key} as bytes, not as a tensor: this is not supported"
            )
        (dtype, *_), chunks = about.state["properties"].state, []
        for chunk in about.state["chunks"]:
            start, size = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
            info = places[key, start]
            stored = _place_of(directory, key, info, size, dtype, sizes)
            box = tuple((at, at + count) for at, count in zip(start, size, strict=True))
            path = directory / info["relative_path"]
            chunks.append(Chunk(Piece(box, (0,) * len(box)), dtype, path, cache(stored)))
        if match := STACKED.fullmatch(name):
            tensors |= _layers(match, chunks)
        else:
            tensors[name] = whole_of(chunks)
    return tensors


def _place_of(directory, key, info: dict, size: tuple, dtype: torch.dtype, sizes):
    """Return a function that locates a chunk. Raises UserError if its file can't contain it."""
    file, start, length = info["relative_path"], info["offset"], info["length"]
    path = directory / file
    if Path(file).name != file or file in ("", ".."):
        raise UserError(f"{directory / METADATA} names a file outside its directory: {file}")
    if info.get("transform_descriptors"):
        raise UserError(f"{path}: {key} is compressed or encrypted, which is not supported")
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"{path}: {key} is of an unknown dtype")
    if min(start, length) < 0 or start + length > sizes(file):
        raise UserError(f"{path} has {sizes(file)} bytes, but should have {start + length}")
    if math.prod(max(count, 1) for count in size) * dtype.itemsize > length:
        raise UserError(f"{path}: {length} bytes can't hold {list(size)} of {key}")
    return partial(_stored, path, key, start, length, size, dtype)


def _stored(path: Path, key: str, start: int, length: int, size: tuple, dtype) -> StoredTensor:
    """Return the location of a chunk that torch.save wrote to a part of a file."""
    tensor = load_torch(path, start, length)
    if not isinstance(tensor, StoredTensor) or (tensor.shape, tensor.dtype) != (size, dtype):
        raise UserError(f"{path}: {key} does not match {METADATA}", exit_code=1)
    return tensor


def _layers(match: re.Match, chunks: list[Chunk]) -> dict[str, Whole]:
    """Return the tensors of single layers, by name, from chunks of stacked layers."""
    of_layer: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        (first, last), *box = chunk.piece.box
        for layer in range(first, last):
            inner = Piece(tuple(box), (0,) * len(box))
            stored = partial(_row, chunk.stored, layer - first)
            name = f"{match[1]}.{layer}.{match[2]}"
            of_layer.setdefault(name, []).append(Chunk(inner, chunk.dtype, chunk.path, stored))
    return {name: whole_of(parts) for name, parts in of_layer.items()}


def _row(stored, index: int) -> StoredTensor:
    """Return one row of a stacked tensor."""
    start, (_, *shape), dtype = stored()
    row = torch.Size(shape).numel() * dtype.itemsize
    return StoredTensor(start + index * row, tuple(shape), dtype)


def _size_of(directory: Path, file: str) -> int:
    try:
        return (directory / file).stat().st_size
    except OSError:
        raise UserError(f"{directory / file} is missing") from None
