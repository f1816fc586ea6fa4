"""What all places have in common that tensors are read from: of each global tensor, any box."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from megazoo.checkpoint.tensor_files import TensorFiles
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import NamedParameter
from megazoo.parallel.shard import ParameterSpec, Piece
from megazoo.parallel.staging import Upload


class TensorSource:
    """Tensors on disk, opened, by their global names.

    specs: the shape and cut of each. trainer: what the training program saved beside them.
    sidecar_files: the tokenizer's and the generation's files, which travel along. generation: what
    generation_config.json says. verifies: whether what is read is compared with checksums: see
    verifying.py.
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
        """Bytes that were asked of the files so far."""
        return self.files.bytes_read

    @property
    def has_states(self) -> bool:
        """Whether there is optimizer state."""
        return False

    @property
    def about_adapters(self) -> dict:
        """What the manifest of a checkpoint says of adapters, if it holds these alone: see
        format.py."""
        return {}

    def verify(self, progress: Callable[[int], object] = lambda _: None) -> None:
        """Read every file. UserError for one that is not as it was written, as far as is known.

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
        """Return the files in which a rank's parts of some tensors lie, if there are checksums to
        compare with."""
        return set()

    def check_crc32(self, name: str, crc: int) -> None:
        """Raise UserError if a file has another checksum than when it was written."""

    @torch.no_grad()
    def read_into(
        self, name: str, destination: torch.Tensor, spec: ParameterSpec, ctx: ParallelContext
    ) -> None:
        """Fill a rank's part of the global tensor `name`; only the bytes that it owns are read."""
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
        """Fill `destination`, [n], with elements first to last of a rank's part of the global
        tensor `name`, flattened.

        Of the rows that these lie in, only the bytes that the rank owns are read.
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
