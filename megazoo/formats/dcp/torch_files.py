"""Read files, or parts of files, that torch.save wrote: their contents, and boxes of their
tensors."""

import io
import mmap
import os
import struct
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import torch

from megazoo.errors import UserError
from megazoo.files import regular_file
from megazoo.formats.dcp.unpickling import Storage, StoredTensor, unpickle
from megazoo.parallel.shard import Box

LARGEST_PICKLE = 1 << 28  # in bytes; a tensor needs a few hundred


def load_pickle(path: Path) -> Any:
    """Return the contents of a pickle file without tensors. Raises UserError if it can't be read,
    or would call anything."""
    with _readable(path), open(regular_file(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > LARGEST_PICKLE:
            raise ValueError("it is too large")
        return unpickle(file, path)


def load_torch(path: Path, start: int = 0, size: int | None = None) -> Any:
    """Return the contents of a file that torch.save wrote, with a StoredTensor for each tensor.
    Raises UserError, with the name of the file, if it can't be read, or would call anything.

    start, size: range in bytes, if torch.save wrote to a part of the file.
    """
    with _readable(path), open(regular_file(path), "rb") as file:
        there = file.seek(0, io.SEEK_END)
        size = there - start if size is None else size
        if min(start, size) < 0 or start + size > there:
            raise ValueError(f"it has {there} bytes, but should have {start + size}")
        window = _Window(file, start, size)
        with ZipFile(window) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if records["data.pkl"].file_size > LARGEST_PICKLE:
                raise ValueError("its pickle is too large")
            order = records.get("byteorder")
            if order and (order.file_size > 10 or archive.read(order) != b"little"):
                raise ValueError("its numbers are big-endian")
            pickled = archive.read(records["data.pkl"])

        def storage(name: str, dtype: torch.dtype, count: int) -> Storage:
            record = records[f"data/{name}"]
            window.seek(record.header_offset + 26)
            names = sum(struct.unpack("<2H", window.read(4)))
            begin = record.header_offset + 30 + names
            length = count * dtype.itemsize
            if record.compress_type != ZIP_STORED or length > record.file_size:
                raise ValueError(f"it lacks elements of {name}")
            if count < 0 or begin + length > size:
                raise ValueError("it ends too early")
            return Storage(start + begin, dtype, count)

        return unpickle(io.BytesIO(pickled), path, storage)


def read_box(path: Path, tensor: StoredTensor, box: Box) -> torch.Tensor:
    """Return a box of a tensor as a view of the memory-mapped file. It is copied only if it is not
    aligned for its dtype. Raises UserError if the file is too short."""
    bytes_each = tensor.dtype.itemsize
    inner, columns = (tensor.shape[1:], box[1:]) if len(box) > 1 else ((1,), ((0, 1),))
    (first, last), row = box[0], torch.Size(inner).numel() * bytes_each
    begin, length = tensor.start + first * row, (last - first) * row
    before = begin % mmap.ALLOCATIONGRANULARITY
    with _readable(path), open(regular_file(path), "rb") as file:
        area = mmap.mmap(
            file.fileno(), before + length, access=mmap.ACCESS_COPY, offset=begin - before
        )
    values = torch.frombuffer(area, dtype=torch.uint8, count=length, offset=before)
    values = values.view(last - first, *inner[:-1], inner[-1] * bytes_each)
    *middle, (left, right) = columns
    cut = (slice(None), *(slice(*bounds) for bounds in middle))
    values = values[*cut, left * bytes_each : right * bytes_each]
    if begin % bytes_each:
        values = values.clone(memory_format=torch.contiguous_format)
    return values.view(tensor.dtype).reshape([stop - start for start, stop in box])


class _Window(io.RawIOBase):
    """A part of an open file, as a separate file."""

    def __init__(self, file: io.BufferedReader, start: int, size: int):
        self.file, self.start, self.size, self.place = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence]
        self.place = max(0, base + offset)
        return self.place

    def readinto(self, buffer) -> int:
        self.file.seek(self.start + self.place)
        wanted = min(len(buffer), max(0, self.size - self.place))
        count = self.file.readinto(memoryview(buffer)[:wanted])
        self.place += count
        return count


@contextmanager
def _readable(path: Path):
    """Convert errors in reading a file to a UserError with the name of the file."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # pickle and zipfile have custom errors for broken files
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{path} can't be read: {lines[0]}") from error
