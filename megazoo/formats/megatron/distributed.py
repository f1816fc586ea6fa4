"""Read Megatron-LM's format torch_dist: chunks of tensors, stored under the names of the whole
tensors.

metadata.json    {"sharded_backend": "torch_dist", ...}
common.pt        data common to all ranks: the arguments, the iteration ...
.metadata        names and shapes of all tensors, and the location of each chunk
__R_N.distcp     chunks, each written by torch.save, one after the other
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megazoo.errors import UserError
from megazoo.files import json_object, read_bytes
from megazoo.formats.dcp.metadata import OF_MEGATRON, read_metadata
from megazoo.formats.dcp.tensors import Chunk, Whole, whole_of
from megazoo.formats.dcp.torch_files import load_torch
from megazoo.formats.dcp.unpickling import StoredTensor
from megazoo.formats.megatron.names import bare_name, is_state
from megazoo.parallel.shard import Piece

COMMON, ABOUT = OF_MEGATRON
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
            f"{directory} has no {COMMON}, which describes a model of Megatron-LM: use another "
            "checkpoint"
        )
    common = load_torch(directory / COMMON)
    arguments = common.get("args") if isinstance(common, dict) else None
    return arguments, _tensors(directory)


def _tensors(directory: Path) -> dict[str, Whole]:
    tensors = {}
    for key, entry in read_metadata(directory, lambda key: not is_state(bare_name(key))).items():
        if entry is None:
            raise UserError(
                f"{directory} stores {key} as bytes, not as a tensor: this is not supported"
            )
        name = bare_name(key)
        if (match := STACKED.fullmatch(name)) and entry.shape:
            tensors |= _layers(match, entry.chunks)
        else:
            tensors[name] = whole_of(entry.chunks)
    return tensors


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
