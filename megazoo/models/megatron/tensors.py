"""What the files of a Megatron-LM checkpoint hold between them: whole tensors, in pieces."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import torch

from megazoo.models.megatron.torch_files import read_box
from megazoo.models.megatron.unpickling import StoredTensor
from megazoo.parallel.shard import Box, Piece, in_parts, overlap

AT_ONCE = 1 << 18  # elements that are copied, where a file has them at an odd place


@dataclass
class Chunk:
    """A box of a whole tensor that one tensor of a file holds.

    piece: the box, and where it starts in that tensor. dtype: of that tensor. stored: tells where
    it lies; it may have to open the file.
    """

    piece: Piece
    dtype: torch.dtype
    path: Path
    stored: Callable[[], StoredTensor]


class Whole(NamedTuple):
    """A tensor of Megatron-LM's, cut into chunks."""

    shape: tuple[int, ...]
    chunks: list[Chunk]

    @property
    def dtype(self) -> torch.dtype:
        """What holds the numbers of all chunks."""
        return reduce(torch.promote_types, (chunk.dtype for chunk in self.chunks))

    def read(self, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the numbers of a box, as far as the chunks have them, in smaller boxes."""
        for chunk in self.chunks:
            common = overlap(box, chunk.piece.box)
            for part in in_parts(common, AT_ONCE) if common else []:
                there = tuple((cut.start, cut.stop) for cut in chunk.piece.index(part))
                yield part, read_box(chunk.path, chunk.stored(), there)


def whole_of(chunks: list[Chunk]) -> Whole:
    """Return the tensor that some chunks make: it ends where they do."""
    ends = zip(*([stop for _, stop in chunk.piece.box] for chunk in chunks), strict=True)
    return Whole(tuple(map(max, ends)), chunks)


def place_in(shape: tuple[int, ...], dim: int, start: int, stop: int) -> Box:
    """Return the box of a tensor between two places along one dimension."""
    whole = [(0, size) for size in shape]
    return (*whole[:dim], (start, stop), *whole[dim + 1 :])
