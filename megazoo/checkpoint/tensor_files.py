"""Read boxes of named tensors from safetensors and .bin files."""

from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from zlib_ng.zlib_ng import crc32

from megazoo.checkpoint.format import DTYPES
from megazoo.errors import UserError
from megazoo.files import check_whole, regular_file
from megazoo.parallel.shard import Box

STEP = 1 << 20  # number of bytes that are read and checksummed together
MAPPED = 1 << 26  # bytes of a safetensors file that are read before it is mapped again


class TensorFiles:
    """The safetensors and .bin files of a directory. A file is opened at its first use.

    A box of a tensor is a view of the memory-mapped file, which is read when the box is used. A
    safetensors file is mapped again from time to time: what was read then leaves memory. Only
    tensors are unpickled. Raises UserError, with the name, for a file that is missing, broken or
    has other contents. bytes_read: number of bytes requested so far. opened: opened(directory,
    name) opens a file of another format, and returns an object with the interface of an open
    safetensors file.
    """

    def __init__(self, directory: Path, opened: Callable[[Path, str], Any] | None = None):
        self.directory, self.bytes_read = directory, 0
        self._opened = opened or _opened
        self._open: dict[str, Any] = {}
        self._names: dict[str, set[str]] = {}
        self._mapped: dict[str, int] = {}  # bytes that were read since a file was opened

    def names(self, file: str) -> set[str]:
        """Return the names of the tensors in a file."""
        self._file(file)
        return self._names[file]

    def _file(self, file: str) -> Any:
        """Return an open file. Other threads may open and close it at any time."""
        opened = self._open.get(file)
        if opened is None:
            opened = self._opened(self.directory, file)
            self._names[file] = set(opened.keys())
            self._mapped[file] = 0
            self._open[file] = opened
        return opened

    def close(self) -> None:
        """Close the files. The next use opens them again."""
        self._open.clear()

    def shape(self, file: str, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(file, name).get_shape())

    def dtype(self, places: list[tuple[str, str]]) -> torch.dtype:
        """Return the dtype that can represent all of these tensors. places: their (file, name)."""
        kinds = [self._slice(file, name)[:0].dtype for file, name in places]
        for (file, name), kind in zip(places, kinds, strict=True):
            if kind not in DTYPES:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
                raise UserError(
                    f"{self.directory / file}: {name} has the data type {kind}: use one of {known}"
                )
        return reduce(torch.promote_types, kinds)

    def box(self, file: str, name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
        """Return a box of a tensor. Raises UserError if the shape of the tensor is not `shape`."""
        stored = self._slice(file, name)
        self.check_shape(file, name, shape)
        view = stored[tuple(slice(*bounds) for bounds in box)]
        self.bytes_read += view.nbytes
        self._mapped[file] += view.nbytes
        if self._mapped[file] > MAPPED and file.endswith(".safetensors"):
            self._open.pop(file, None)
        return view

    def check_shape(self, file: str, name: str, shape: tuple[int, ...]) -> None:
        """Raise UserError if a tensor does not have the shape that the model needs."""
        stored = self.shape(file, name)
        if stored != shape:
            raise UserError(
                f"{self.directory / file}: {name} has shape {list(stored)}, "
                f"but in the model it has shape {list(shape)}",
                exit_code=1,
            )

    def _slice(self, file: str, name: str):
        opened = self._file(file)
        if name not in self._names[file]:
            raise UserError(f"{self.directory / file} has no tensor {name}", exit_code=1)
        return opened.get_slice(name)


def _opened(directory: Path, file: str):
    path = directory / file
    try:
        if Path(file).name != file:
            raise ValueError("it is outside of its directory")
        check_whole(path)
        return safe_open(path, framework="pt") if path.suffix == ".safetensors" else _Pickled(path)
    except UserError:
        raise
    except Exception as error:  # safetensors and pickle have custom errors for broken files
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{path} can't be read: {lines[0]}", exit_code=1) from error


class Slices:
    """The tensors of a file, with the interface of an open safetensors file.

    tensors: by name, each with the interface of a slice of safetensors.
    """

    def __init__(self, tensors: dict[str, Any]):
        self._tensors = tensors

    def keys(self):
        return self._tensors.keys()

    def get_slice(self, name: str) -> Any:
        return self._tensors[name]


class _Pickled:
    """A .bin file, memory-mapped if possible, with the interface of an open safetensors file."""

    def __init__(self, path: Path):
        mapped = is_zipfile(path)  # files of PyTorch before 1.6 are not, and are read whole
        self.tensors = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
        if not isinstance(self.tensors, dict) or not all(map(_is_plain, self.tensors.values())):
            raise ValueError("it does not hold named tensors")
        for name in self.tensors:
            if not isinstance(name, str):
                raise ValueError(f"it has a tensor whose name is not a string: {name!r}")

    def keys(self):
        return self.tensors.keys()

    def get_slice(self, name: str) -> "_PickledSlice":
        return _PickledSlice(self.tensors[name])


def _is_plain(tensor) -> bool:
    """Return whether `tensor` is a dense tensor with all its elements in the file."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.nbytes <= tensor.untyped_storage().nbytes()
    )


class _PickledSlice:
    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index) -> torch.Tensor:
        return self.tensor[index]


def pieces_of_file(path: Path, size: int = 1 << 24) -> Iterator[bytes]:
    """Yield the bytes of a file. Raises UserError, with its name, if it can't be read."""
    try:
        with open(regular_file(path), "rb") as file:
            while piece := file.read(size):
                yield piece
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}", exit_code=1) from error


def crc32_of(
    path: Path,
    progress: Callable[[int], object] = lambda _: None,
    *,
    interrupted: Callable[[], bool] = lambda: False,
) -> int:
    """Compute the crc32 of a file. Raises UserError, with its name, if it can't be read.

    progress: called with the number of bytes read since the last call. interrupted: called
    repeatedly; once it returns True, this function returns immediately, with a meaningless result.
    """
    crc = 0
    for piece in pieces_of_file(path, STEP):
        if interrupted():
            break
        crc = crc32(piece, crc)
        progress(len(piece))
    return crc
