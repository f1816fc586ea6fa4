"""Whole tensors of a checkpoint, made of chunks in several files."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import torch

from megazoo.formats.dcp.torch_files import read_box
from megazoo.formats.dcp.unpickling import StoredTensor
from megazoo.parallel.shard import Box, Piece, in_parts, overlap

AT_ONCE = 1 << 18  # number of elements copied together, if they are not aligned in the file


@dataclass
class Chunk:
    """A box of a whole tensor, stored in one tensor of a file.

    piece: the box, and its start in the stored tensor. dtype: of the stored tensor. stored: returns
    the location of the stored tensor; it may open the file.
    """

    piece: Piece
    dtype: torch.dtype
    path: Path
    stored: Callable[[], StoredTensor]


class Whole(NamedTuple):
    """A tensor that is split into chunks."""

    shape: tuple[int, ...]
    chunks: list[Chunk]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that can represent the values of all chunks."""
        return reduce(torch.promote_types, (chunk.dtype for chunk in self.chunks))

    def read(self, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield smaller boxes with the values that the chunks have of a box."""
        for chunk in self.chunks:
            common = overlap(box, chunk.piece.box)
            for part in in_parts(common, AT_ONCE) if common else []:
                there = tuple((cut.start, cut.stop) for cut in chunk.piece.index(part))
                yield part, read_box(chunk.path, chunk.stored(), there)


def whole_of(chunks: list[Chunk]) -> Whole:
    """Return the tensor that is made of the chunks. The chunks define its shape."""
    ends = zip(*([stop for _, stop in chunk.piece.box] for chunk in chunks), strict=True)
    return Whole(tuple(map(max, ends)), chunks)


def place_in(shape: tuple[int, ...], dim: int, start: int, stop: int) -> Box:
    """Return the box of a tensor from `start` to `stop` along one dimension."""
    whole = [(0, size) for size in shape]
    return (*whole[:dim], (start, stop), *whole[dim + 1 :])
