"""Checkpoints on disk: streamed safetensors files, and the manifest that makes a directory whole."""

import errno
import fcntl
import json
import math
import mmap
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from megazoo.checkpoint.places import LATEST, MANIFEST, step_name
from megazoo.errors import UserError
from megazoo.tokenizer import TOKENIZER_FILES, TOKENIZER_SIDECARS

FORMAT_VERSION = 1
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
PIECE_BYTES = 8 << 20  # what is held of a tensor while it is written
BLOCK = 4096  # of a disk, or a multiple of it
GENERATION = "generation_config.json"
# Files that travel along with the weights, so that what is written runs as it is.
SIDECAR_FILES = (GENERATION, *TOKENIZER_FILES, *TOKENIZER_SIDECARS, "chat_template.jinja")


class Lazy(NamedTuple):
    """A tensor that is made while it is written, some rows at a time.

    fill: fill(rows, start) puts into the tensor `rows` those from number `start` on.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[torch.Tensor, int], None]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor | Lazy]) -> dict:
    """Stream tensors into a safetensors file, and to the disk; returns its {"size", "crc32"}.

    The format is eight bytes of header length (little-endian), a JSON header, and the raw bytes of
    the tensors.
    """
    header, end = {"__metadata__": {"format": "pt", "writer": "megazoo"}}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    rows = [tensor.nbytes // max(1, tensor.shape[0]) for tensor in tensors.values()]
    buffer = _pages(max([PIECE_BYTES, *rows]))  # a rank may own no tensor
    with NewFile(path, 8 + len(text) + end) as file:
        file.write(
            torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
        )
        for tensor in tensors.values():
            for piece in _pieces(tensor, buffer):
                file.write(piece.view(-1).view(torch.uint8))
    return {"size": file.size, "crc32": file.crc32}


class NewFile:
    """A file of a known size, written from front to back. When its block ends, it is on the disk.

    Where the system can, its blocks are taken at once, so that a full disk shows early, and the
    bytes go past the page cache: several times faster for what is larger than the memory that the
    machine has at hand, and none of it is lost to the cache.
    """

    def __init__(self, path: Path, size: int):
        self.path, self.size, self.crc32, self._held = path, size, 0, 0
        self._buffer = _pages(PIECE_BYTES)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._descriptor = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:  # which is how a file system says that it can't
                raise
            self._descriptor = os.open(path, flags, 0o666)

    def __enter__(self) -> "NewFile":
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._descriptor, 0, self.size)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    os.close(self._descriptor)
                    raise  # else the file system can't: it goes without
        return self

    def write(self, data: torch.Tensor) -> None:
        """Append bytes: uint8 [size]."""
        self.crc32 = zlib.crc32(data.numpy(), self.crc32)
        while len(data):
            count = min(len(data), len(self._buffer) - self._held)
            # without holding up other threads
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
        if hasattr(os, "O_DIRECT") and self._held % BLOCK:  # the end of the file: not whole blocks
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        rest = memoryview(self._buffer.numpy())[: self._held]
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._held = 0


def _pages(size: int) -> torch.Tensor:
    """uint8 [size], whole pages that are given back when it is dropped: the heap would fall to
    pieces."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _pieces(tensor: torch.Tensor | Lazy, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's rows, contiguous on the CPU, as many at a time as the buffer of bytes holds."""
    count, row = tensor.shape[0], math.prod(tensor.shape[1:])
    step = max(1, min(count, len(buffer) // tensor.dtype.itemsize // max(1, row)))
    for start in range(0, count, step):
        rows = min(step, count - start)
        if isinstance(tensor, Lazy):
            piece = (
                buffer[: rows * row * tensor.dtype.itemsize]
                .view(tensor.dtype)
                .view(rows, *tensor.shape[1:])
            )
            tensor.fill(piece, start)
            yield piece
        else:
            yield tensor.detach()[start : start + rows].cpu().contiguous()


def write_json(path: Path, value) -> dict:
    """Write JSON to the disk; returns its {"size", "crc32"}."""
    return write_atomically(path, json_bytes(value))


def json_bytes(value) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def manifest_checksum(manifest: dict) -> int:
    """The crc32 of a manifest: of its compact JSON, keys sorted, without its own key crc32."""
    rest = {key: value for key, value in manifest.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def write_atomically(path: Path, data: bytes) -> dict:
    """Write a file that is there whole or not at all; returns its {"size", "crc32"}."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        sync(file.fileno())
    os.replace(partial, path)
    return {"size": len(data), "crc32": zlib.crc32(data)}


def remove(directory: Path, ignore_errors: bool = False) -> None:
    """Remove a step's directory, if it is there; its manifest goes first, so that what is left
    never looks whole."""
    if directory.exists():
        (directory / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors)


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def staging_directory(directory: Path, step: int) -> Path:
    """An empty hidden directory in which a step is written."""
    staging = directory / f".{step_name(step)}.partial"
    directory.mkdir(parents=True, exist_ok=True)
    remove(staging)
    staging.mkdir()
    return staging


def publish(staging: Path, step: int, keep_last: int = 0) -> Path:
    """Give a whole step its name, in place of an older one of that name, and point `latest` at it.

    keep_last: how many steps, the last written ones, remain; 0: all.
    """
    directory, final = staging.parent, staging.parent / step_name(step)
    with replace_directory(staging, final):
        write_atomically(directory / LATEST, f"{final.name}\n".encode())
        sync_directory(directory)
    if keep_last:
        older = {
            manifest.parent: manifest.stat().st_mtime_ns
            for manifest in directory.glob(f"step_*/{MANIFEST}")
        }
        older.pop(final)
        for old in sorted(older, key=lambda path: (older[path], path))[
            : max(0, len(older) + 1 - keep_last)
        ]:
            remove(old)
    return final


@contextmanager
def replace_directory(staging: Path, final: Path):
    """Rename a whole directory over an older one, which is kept aside until the block ends."""
    replaced = final.parent / f".{final.name}.replaced"
    remove(replaced)
    sync_directory(staging)
    if final.exists():
        os.rename(final, replaced)
    os.rename(staging, final)
    yield
    remove(replaced)


def check_replaceable(directory: Path, overwrite: bool = False) -> None:
    """Raise UserError unless a new directory may take this one's place: it is empty, or ours, or to
    be overwritten."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise UserError(f"{directory} is not empty: choose another, or --overwrite")


@contextmanager
def new_directory(directory: Path):
    """A new directory in which to write; when the block ends well, it takes the place of
    `directory`, else it goes."""
    staging = directory.parent / f".{directory.name}.partial"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        remove(staging)
        staging.mkdir()
        yield staging
        with replace_directory(staging, directory):
            sync_directory(directory.parent)
    except OSError as error:
        remove(staging, ignore_errors=True)
        raise UserError(
            f"can't write {directory}: {error.strerror or error}", exit_code=1
        ) from error
    except BaseException:
        remove(staging, ignore_errors=True)
        raise
