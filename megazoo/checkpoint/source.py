"""What all places that a model is read from have in common: named global tensors, of which any box
can be had."""

import math
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import torch
from safetensors import safe_open

from megazoo.checkpoint.format import DTYPES
from megazoo.errors import UserError
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import Entry
from megazoo.parallel.shard import Box, ParameterSpec, Piece
from megazoo.tokenizer import TOKENIZER_FILES


class Source:
    """Tensors on disk, opened, by our global names.

    specs: the shape and cut of every weight, by its name. trainer: what the training program saved
    beside them.
    sidecar_files: the tokenizer's and the generation's files, which travel along. generation: what
    generation_config.json says. bytes_read: what was asked of the files so far.
    """

    path: Path
    specs: dict[str, ParameterSpec]
    trainer: dict
    sidecar_files: dict[str, bytes]
    generation: dict

    def __init__(self, path: Path):
        self.path, self.files = path, TensorFiles(path)

    @property
    def tokenizer(self) -> str | None:
        """What opens its tokenizer: its own directory, if the files are there, or what it was
        trained with."""
        beside = any((self.path / name).is_file() for name in TOKENIZER_FILES)
        return str(self.path) if beside else self.trainer.get("settings", {}).get("tokenizer")

    @property
    def bytes_read(self) -> int:
        return self.files.bytes_read

    def states_of(self, name: str) -> list[str]:
        """The optimizer's states of a parameter."""
        return []

    @property
    def has_states(self) -> bool:
        """Whether there is optimizer state."""
        return any(self.states_of(name) for name in self.specs)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is stored."""
        raise NotImplementedError

    def read_pieces(
        self, name: str, destination: torch.Tensor, spec: ParameterSpec, pieces: list[Piece]
    ) -> None:
        """Fill the given pieces of `destination` from the global tensor `name`."""
        raise NotImplementedError

    @torch.no_grad()
    def read_into(
        self, name: str, destination: torch.Tensor, spec: ParameterSpec, ctx: ParallelContext
    ) -> None:
        """Fill a rank's part of the global tensor `name`; only the bytes that it owns are read."""
        self.read_pieces(name, destination, spec, spec.pieces(ctx.tp_size, ctx.tp_rank))

    @torch.no_grad()
    def read_range(
        self,
        name: str,
        destination: torch.Tensor,
        wanted: tuple[int, int],
        entry: Entry,
        ctx: ParallelContext,
    ) -> None:
        """Fill `destination`, [n], with elements first to last of a rank's part of the global
        tensor `name`, flattened.

        Of the rows that these lie in, only the bytes that the rank owns are read.
        """
        (first, last), shape = wanted, entry.parameter.shape
        columns = max(1, entry.parameter.numel() // shape[0])
        start, stop = first // columns, -(-last // columns)
        pieces = [
            piece.in_rows(start, stop) for piece in entry.spec.pieces(ctx.tp_size, ctx.tp_rank)
        ]
        rows = torch.empty(stop - start, *shape[1:], dtype=destination.dtype)
        self.read_pieces(name, rows, entry.spec, [piece for piece in pieces if piece])
        destination.copy_(rows.view(-1)[first - start * columns : last - start * columns])

    def weight_bytes(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of the weights, in dtype or as stored."""
        sizes = (
            (math.prod(spec.shape), dtype or self.dtype_of(name))
            for name, spec in self.specs.items()
        )
        return sum(count * kind.itemsize for count, kind in sizes)

    def total_bytes(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of the weights, and of the optimizer state if there is one."""
        states = [
            (f"{name}.{state}", spec)
            for name, spec in self.specs.items()
            for state in self.states_of(name)
        ]
        return self.weight_bytes(dtype) + sum(
            math.prod(s.shape) * self.dtype_of(n).itemsize for n, s in states
        )


class TensorFiles:
    """The safetensors and .bin files of a directory, opened when they are first asked.

    A box of a tensor is a view of its file, mapped into memory: nothing is copied before it is
    used, and nothing but tensors is unpickled. UserError, naming the file, if it is missing, broken
    or holds something else.
    """

    def __init__(self, directory: Path):
        self.directory, self.bytes_read = directory, 0
        self._open: dict[str, object] = {}
        self._names: dict[str, set[str]] = {}

    def names(self, file: str) -> set[str]:
        """The names of a file's tensors."""
        if file not in self._open:
            path = self.directory / file
            try:
                if Path(file).name != file:
                    raise ValueError("it is outside of its directory")
                opened = (
                    safe_open(path, framework="pt")
                    if path.suffix == ".safetensors"
                    else _Pickled(path)
                )
            except (
                Exception
            ) as error:  # safetensors and pickle raise types of their own for a broken file
                reason = (
                    str(error).strip().splitlines()[0]
                    if str(error).strip()
                    else type(error).__name__
                )
                raise UserError(f"{path} can't be read: {reason}", exit_code=1) from error
            self._open[file], self._names[file] = opened, set(opened.keys())
        return self._names[file]

    def shape(self, file: str, name: str) -> tuple[int, ...]:
        return tuple(self._slice(file, name).get_shape())

    def dtype(self, places: list[tuple[str, str]]) -> torch.dtype:
        """The dtype that holds all of these tensors, each given by (file, name)."""
        kinds = [self._slice(file, name)[:0].dtype for file, name in places]
        for (file, name), kind in zip(places, kinds, strict=True):
            if kind not in DTYPES:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
                raise UserError(f"{self.directory / file}: {name} is of {kind}: there are {known}")
        return reduce(torch.promote_types, kinds)

    def box(self, file: str, name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
        """A box of a tensor whose shape must be `shape`."""
        stored = self._slice(file, name)
        self.check_shape(file, name, shape)
        view = stored[tuple(slice(*bounds) for bounds in box)]
        self.bytes_read += view.nbytes
        return view

    def check_shape(self, file: str, name: str, shape: tuple[int, ...]) -> None:
        if self.shape(file, name) != shape:
            has = f"{name} has shape {list(self.shape(file, name))}"
            raise UserError(
                f"{self.directory / file}: {has}, the model's is {list(shape)}", exit_code=1
            )

    def _slice(self, file: str, name: str):
        if name not in self.names(file):
            raise UserError(f"{self.directory / file} has no tensor {name}", exit_code=1)
        return self._open[file].get_slice(name)


class _Pickled:
    """A .bin file, mapped into memory, with the calls of an open safetensors file."""

    def __init__(self, path: Path):
        self.tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(self.tensors, dict) or not all(map(_is_plain, self.tensors.values())):
            raise ValueError("it does not hold named tensors")

    def keys(self):
        return self.tensors.keys()

    def get_slice(self, name: str) -> "_PickledSlice":
        return _PickledSlice(self.tensors[name])


def _is_plain(tensor) -> bool:
    """Whether it is a tensor whose every element is in the file."""
    plain = (
        isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
    )
    return plain and tensor.nbytes <= tensor.untyped_storage().nbytes()


class _PickledSlice:
    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index) -> torch.Tensor:
        return self.tensor[index]


def pieces_of_file(path: Path, size: int = 1 << 24) -> Iterator[bytes]:
    """The bytes of a file; UserError, naming it, if it can't be read."""
    try:
        with open(path, "rb") as file:
            while piece := file.read(size):
                yield piece
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}", exit_code=1) from error
