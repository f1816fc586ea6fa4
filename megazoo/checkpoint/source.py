"""The base class of all sources of tensors, which can read any box of a global tensor."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from megazoo.checkpoint.tensor_files import TensorFiles
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import NamedParameter
from megazoo.parallel.shard import ParameterSpec, Piece
from megazoo.parallel.staging import Upload


class TensorSource:
    """Open tensors on disk, by their global names.

    specs: shape and shards of each tensor. trainer: the contents of trainer.json. sidecar_files:
    the bytes of tokenizer files and generation_config.json. generation: the values of
    generation_config.json. verifies: whether files are compared with checksums: see verifying.py.
    """

    verifies = False

    path: Path
    specs: dict[str, ParameterSpec]
    trainer: dict
    sidecar_files: dict[str, bytes]
    generation: dict

    def __init__(self, path: Path, files: TensorFiles | None = None):
        self.path, self.files = path, files or TensorFiles(path)
        self._upload = Upload()

    @property
    def bytes_read(self) -> int:
        """Number of bytes read from the files so far."""
        return self.files.bytes_read

    @property
    def has_states(self) -> bool:
        """Whether there is optimizer state."""
        return False

    @property
    def attached(self) -> dict:
        """The entries of a manifest on what is attached to the model, such as adapters. A source
        that has some holds only a part of the model."""
        return {}

    def verify(self, progress: Callable[[int], object] = lambda _: None) -> None:
        """Read every file. UserError for a corrupt file, if there are checksums.

        progress: is called with the number of bytes that were just read.
        """
        raise NotImplementedError

    def states_of(self, name: str) -> list[str]:
        """Return the names of the optimizer's states of a parameter."""
        return []

    def most_precise(self, name: str) -> str:
        """Return the name of the tensor that holds a parameter's values in the most precision."""
        return name

    def close(self) -> None:
        """Close the files, and free what they were read through; the next read opens them again."""
        self.files.close()
        self._upload = Upload()

    def __getstate__(self) -> dict:
        """Return what a copy has: no open files."""
        self.close()
        return vars(self)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored."""
        raise NotImplementedError

    def read_pieces(
        self, name: str, destination: torch.Tensor, spec: ParameterSpec, pieces: list[Piece]
    ) -> None:
        """Fill the given pieces of `destination` from the global tensor `name`."""
        raise NotImplementedError

    def put(self, destination: torch.Tensor, values: torch.Tensor) -> None:
        """Copy values of a file into a tensor of their shape, on any device."""
        for start, rows in self._upload.rows(destination):
            rows.copy_(values[start : start + len(rows)])

    def file_sizes(self) -> dict[str, int]:
        """Return the bytes of each file."""
        raise NotImplementedError

    def files_of(
        self, tensors: Iterable[tuple[str, ParameterSpec]], ctx: ParallelContext
    ) -> set[str]:
        """Return the files with a rank's shards of some tensors; none if there are no checksums."""
        return set()

    def check_crc32(self, name: str, crc: int) -> None:
        """Raise UserError if a file has another checksum than when it was written."""

    @torch.no_grad()
    def read_into(
        self, name: str, destination: torch.Tensor, spec: ParameterSpec, ctx: ParallelContext
    ) -> None:
        """Fill a rank's shard of the global tensor `name`, reading only its bytes."""
        self.read_pieces(name, destination, spec, spec.pieces(ctx.place))

    @torch.no_grad()
    def read_range(
        self,
        name: str,
        destination: torch.Tensor,
        wanted: tuple[int, int],
        entry: NamedParameter,
        ctx: ParallelContext,
    ) -> None:
        """Fill `destination`, [n], with a range of elements of a rank's flattened shard of the
        global tensor `name`.

        Only the rows of these elements are read, and of them only the bytes of the rank's shard.
        """
        (first, last), shape = wanted, entry.parameter.shape
        columns = max(1, entry.parameter.numel() // shape[0])
        start, stop = first // columns, -(-last // columns)
        pieces = entry.spec.pieces(ctx.place)
        in_rows = [part for piece in pieces if (part := piece.in_rows(start, stop))]
        if (first, last) == (start * columns, stop * columns):
            rows = destination.view(stop - start, *shape[1:])
            return self.read_pieces(name, rows, entry.spec, in_rows)
        rows = torch.empty(stop - start, *shape[1:], dtype=destination.dtype)
        self.read_pieces(name, rows, entry.spec, in_rows)
        mine = rows.view(-1)[first - start * columns : last - start * columns]
        return self.put(destination, mine)
