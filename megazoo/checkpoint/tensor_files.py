"""Files of named tensors, safetensors and .bin, of which any box of a tensor can be read."""

from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from zlib_ng.zlib_ng import crc32

from megazoo.checkpoint.format import DTYPES
from megazoo.errors import UserError
from megazoo.files import regular_file
from megazoo.parallel.shard import Box

STEP = 1 << 20  # bytes that are read and summed up at once


class TensorFiles:
    """The safetensors and .bin files of a directory, opened when they are first asked.

    A box of a tensor is a view of its file, mapped into memory: nothing is copied before it is
    used, and nothing but tensors is unpickled. A file that is missing, broken or holds something
    else raises UserError, which names it. bytes_read: what was asked of the files so far.
    opened: opens a file of another format, (directory, name), and returns an object with the calls
    of an open safetensors file.
    """

    def __init__(self, directory: Path, opened: Callable[[Path, str], Any] | None = None):
        self.directory, self.bytes_read = directory, 0
        self._opened = opened or _opened
        self._open: dict[str, Any] = {}
        self._names: dict[str, set[str]] = {}

    def names(self, file: str) -> set[str]:
        """Return the names of a file's tensors."""
        if file not in self._open:
            self._open[file] = self._opened(self.directory, file)
            self._names[file] = set(self._open[file].keys())
        return self._names[file]

    def close(self) -> None:
        """Close the files; the next question opens them again."""
        self._open.clear()

    def shape(self, file: str, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(file, name).get_shape())

    def dtype(self, places: list[tuple[str, str]]) -> torch.dtype:
        """Return the dtype that holds all of these tensors, each given by (file, name)."""
        kinds = [self._slice(file, name)[:0].dtype for file, name in places]
        for (file, name), kind in zip(places, kinds, strict=True):
            if kind not in DTYPES:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
                raise UserError(f"{self.directory / file}: {name} is of {kind}: there are {known}")
        return reduce(torch.promote_types, kinds)

    def box(self, file: str, name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
        """Return a box of a tensor; UserError if its shape is not `shape`."""
        stored = self._slice(file, name)
        self.check_shape(file, name, shape)
        view = stored[tuple(slice(*bounds) for bounds in box)]
        self.bytes_read += view.nbytes
        return view

    def check_shape(self, file: str, name: str, shape: tuple[int, ...]) -> None:
        """Raise UserError if a tensor has not the shape that the model says."""
        stored = self.shape(file, name)
        if stored != shape:
            raise UserError(
                f"{self.directory / file}: {name} has shape {list(stored)}, "
                f"the model's is {list(shape)}",
                exit_code=1,
            )

    def _slice(self, file: str, name: str):
        if name not in self.names(file):
            raise UserError(f"{self.directory / file} has no tensor {name}", exit_code=1)
        return self._open[file].get_slice(name)


def _opened(directory: Path, file: str):
    path = directory / file
    try:
        if Path(file).name != file:
            raise ValueError("it is outside of its directory")
        regular_file(path)
        return safe_open(path, framework="pt") if path.suffix == ".safetensors" else _Pickled(path)
    except UserError:
        raise
    except Exception as error:  # safetensors and pickle have types of their own for a broken file
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{path} can't be read: {lines[0]}", exit_code=1) from error


class _Pickled:
    """A .bin file, mapped into memory, with the calls of an open safetensors file."""

    def __init__(self, path: Path):
        self.tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(self.tensors, dict) or not all(map(_is_plain, self.tensors.values())):
            raise ValueError("it does not hold named tensors")
        for name in self.tensors:
            if not isinstance(name, str):
                raise ValueError(f"it has a tensor whose name is no text: {name!r}")

    def keys(self):
        return self.tensors.keys()

    def get_slice(self, name: str) -> "_PickledSlice":
        return _PickledSlice(self.tensors[name])


def _is_plain(tensor) -> bool:
    """Whether it is a tensor whose every element is in the file."""
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
    """Yield the bytes of a file; UserError, naming it, if it can't be read."""
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
    """Compute the crc32 of a file; UserError, naming it, if it can't be read.

    progress: is called with the number of bytes that were just read. interrupted: asked again and
    again; once it is true, the result is of no use and comes at once.
    """
    crc = 0
    for piece in pieces_of_file(path, STEP):
        if interrupted():
            break
        crc = crc32(piece, crc)
        progress(len(piece))
    return crc
