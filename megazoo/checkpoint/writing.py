"""Write safetensors files in a stream, and small files. When a call returns, the data is on the
disk."""

import errno
import fcntl
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from zlib_ng.zlib_ng import crc32

from megazoo.checkpoint.format import DTYPES
from megazoo.errors import UserError
from megazoo.files import open_own
from megazoo.parallel.staging import pinned
from megazoo.sidecars import TEMPLATE_FOLDER

PIECE_BYTES = 8 << 20  # of a tensor in memory at a time, while it is written
BLOCK = 4096  # in bytes: the block size of a disk, or a multiple of it
METADATA = {"format": "pt", "writer": "megazoo"}  # of every safetensors file written here
BytesWritten = Callable[[int], object]  # called with the bytes since the last call


class LazyTensor(NamedTuple):
    """A tensor that is computed while it is written, some rows at a time.

    fill: fill(rows, start) copies the n rows from `start` on into the tensor `rows`, [n, ...].
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[torch.Tensor, int], None]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor | LazyTensor]) -> dict:
    """Stream tensors to a safetensors file, and return its {"size", "crc32"}.

    The format is eight bytes of header length (little-endian), a JSON header, and the raw bytes of
    the tensors. Tensors on a GPU are copied through pinned memory. Raises UserError, with its name,
    for a tensor that is not finite.
    """
    header: dict[str, dict] = {"__metadata__": METADATA}
    end = 0
    on_gpu = any(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in tensors.values())
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    front = bytearray(len(text).to_bytes(8, "little") + text)
    rows = [tensor.nbytes // max(1, tensor.shape[0]) for tensor in tensors.values()]
    # A rank may have no tensors.
    buffer = (pinned if on_gpu else _pages)(max([PIECE_BYTES, *rows]))
    with NewFile(path, len(front) + end) as file:
        file.write(torch.frombuffer(front, dtype=torch.uint8))
        for name, tensor in tensors.items():
            for piece in pieces_of_tensor(tensor, buffer):
                check_finite(name, piece)
                file.write(piece.view(-1).view(torch.uint8))
    return {"size": file.size, "crc32": file.crc32}


class NewFile:
    """A context manager that writes a file of a known size sequentially. On exit the file is on the
    disk.

    If the system supports it, disk space is allocated in advance, so a full disk is detected early.
    The data bypasses the page cache. That is several times faster for files larger than the free
    memory, and leaves that memory free.
    """

    def __init__(self, path: Path, size: int):
        self.path, self.size, self.crc32, self._held = path, size, 0, 0
        self._buffer = _pages(PIECE_BYTES)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._descriptor = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the file system does not support it
                raise
            self._descriptor = os.open(path, flags, 0o666)

    def __enter__(self) -> "NewFile":
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._descriptor, 0, self.size)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    os.close(self._descriptor)
                    raise  # otherwise the file system does not support it
        return self

    def write(self, data: torch.Tensor) -> None:
        """Append bytes: uint8 [size]."""
        self.crc32 = crc32(data.numpy(), self.crc32)
        while len(data):
            count = min(len(data), len(self._buffer) - self._held)
            # torch copies without blocking other threads
            self._buffer[self._held : self._held + count] = data[:count]
            self._held, data = self._held + count, data[count:]
            if self._held == len(self._buffer):
                self._flush()

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if kind is None:
                self._flush()
                sync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def _flush(self) -> None:
        if hasattr(os, "O_DIRECT") and self._held % BLOCK:  # the end of the file: a partial block
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        rest = self._buffer.numpy().data[: self._held]
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._held = 0


def _pages(size: int) -> torch.Tensor:
    """Allocate uint8 [size] in pages that return to the system when the tensor is freed. On the
    heap it would cause fragmentation."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def pieces_of_tensor(
    tensor: torch.Tensor | LazyTensor, buffer: torch.Tensor | None = None
) -> Iterator[torch.Tensor]:
    """Yield contiguous rows of a tensor on the CPU, as many at a time as fit into the buffer. By
    default it has PIECE_BYTES, or the size of one row."""
    count, row = tensor.shape[0], math.prod(tensor.shape[1:])
    if buffer is None:
        buffer = _pages(max(PIECE_BYTES, row * tensor.dtype.itemsize))
    step = max(1, min(count, len(buffer) // tensor.dtype.itemsize // max(1, row)))
    for start in range(0, count, step):
        rows = min(step, count - start)
        if isinstance(tensor, torch.Tensor) and not tensor.is_cuda:
            yield tensor.detach()[start : start + rows].cpu().contiguous()
            continue
        bytes_of_piece = buffer[: rows * row * tensor.dtype.itemsize]
        piece = bytes_of_piece.view(tensor.dtype).view(rows, *tensor.shape[1:])
        if isinstance(tensor, LazyTensor):
            tensor.fill(piece, start)
        else:
            piece.copy_(tensor.detach()[start : start + rows])
        yield piece


def check_finite(name: str, piece: torch.Tensor) -> None:
    """Raise UserError for NaN or infinity in a piece of a tensor.

    It needs one pass, at 16 (bfloat16, float16) to 31 GB/s (float32) on a core where crc32 runs at
    24 GB/s.
    """
    if piece.numel() and not all(math.isfinite(bound) for bound in torch.aminmax(piece)):
        dtype = str(piece.dtype).removeprefix("torch.")
        larger = ": numbers above 65504 need bfloat16 or float32" if dtype == "float16" else ""
        raise UserError(f"{name} is not finite (NaN or infinite) as {dtype}{larger}", exit_code=1)


def write_json(path: Path, value: Any) -> dict:
    """Write a JSON file, and return its {"size", "crc32"}."""
    return write_atomically(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """Return a value as the bytes of a JSON file."""
    return (json.dumps(value, indent=1) + "\n").encode()


def write_atomically(path: Path, data: bytes) -> dict:
    """Write a file atomically, and return its {"size", "crc32"}. The folder of chat templates is
    created if necessary. Raises UserError if that folder is a symbolic link."""
    folder = path.parent
    if folder.name == TEMPLATE_FOLDER:
        if folder.is_symlink():
            raise UserError(
                f"{folder} is a symbolic link, and writing to it would change another directory: "
                "remove the link",
                exit_code=1,
            )
        folder.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with open_own(partial, truncate=True) as file:
        file.write(data)
        file.flush()
        sync(file.fileno())
    os.replace(partial, path)
    return {"size": len(data), "crc32": crc32(data)}


def sync(descriptor: int) -> None:
    """Wait until the data written to a file is on the disk."""
    os.fsync(descriptor)
