"""Token files in the format of Megatron-LM: PREFIX.bin holds the raw tokens, PREFIX.idx the place
of each sequence.

Format of .idx, little-endian, without padding: 9 bytes MMIDIDX\\0\\0; u64 version 1; u8 dtype code;
u64 N, the number of sequences; u64 D, the number of documents + 1; int32[N] lengths in tokens;
int64[N] byte offsets into .bin; int64[D] index of the first sequence of each document, then N.
"""

import os
import struct
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import NoReturn

import numpy as np

from megazoo.errors import UserError
from megazoo.files import open_own

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
BLOCK = 1024  # sequences whose order is checked together
INT32_FROM = 65_500  # vocabulary size: tokens of smaller vocabularies are uint16


class IndexedTokens:
    """The sequences of a .bin and .idx pair, mapped into memory.

    The place of a sequence is checked when the sequence is read, so the time to open an index does
    not depend on its size.

    Args:
        prefix: path of the files without extension.

    Raises:
        UserError: a file is missing, truncated or has floating-point tokens (dtype codes 6 and 7),
            or the two files do not match. The message names the file.
    """

    def __init__(self, prefix: str | Path):
        self.index, self.bin = index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in (index, tokens):
            if not path.is_file():
                raise UserError(f"{path} is missing: {prefix} is not a pair of .bin and .idx")
        data = _mapped(index, np.uint8)
        if len(data) < HEADER.size:
            raise UserError(f"{index} has {len(data)} bytes, fewer than its header")
        magic, version, code, sequences, boundaries = HEADER.unpack(data[: HEADER.size].tobytes())
        if magic != MAGIC or version != 1:
            raise UserError(
                f"{index} is not an index of version 1 (it begins with {magic!r}, {version})"
            )
        if code not in DTYPES:
            kind = "floating-point numbers" if code in (6, 7) else "an unknown type"
            raise UserError(
                f"{index}: dtype code {code} stands for {kind}, but tokens must be integers"
            )
        needed = HEADER.size + 12 * sequences + 8 * boundaries
        if len(data) not in (needed, needed + sequences):  # modes add one byte per sequence
            raise UserError(f"{index} has {len(data)} bytes, but its header needs {needed}")
        parts = np.split(data[HEADER.size : needed], [4 * sequences, 12 * sequences])
        self.lengths, self.offsets, self.documents = (
            np.asarray(part).view(dtype)
            for part, dtype in zip(parts, (np.int32, np.int64, np.int64), strict=True)
        )
        self.dtype = np.dtype(DTYPES[code])
        size, item = tokens.stat().st_size, self.dtype.itemsize
        needed = int(self.offsets[-1]) + int(self.lengths[-1]) * item if sequences else 0
        if needed > size or size % item:
            raise UserError(
                f"{tokens} has {size} bytes: it must have at least the {needed} bytes that {index} "
                f"describes, and a multiple of {item} bytes (one token). Create both files again "
                "with megazoo preprocess"
            )
        self.tokens = _mapped(tokens, self.dtype)
        if not boundaries or self.documents[[0, -1]].tolist() != [0, sequences]:
            raise UserError(
                f"{index}: the boundaries of its documents must run from 0 to {sequences}, the "
                "number of its sequences"
            )

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the tokens of a sequence."""
        return self.tokens[slice(*self.place(index))]

    def place(self, index: int) -> tuple[int, int]:
        """Return the start and end of a sequence in the .bin file, in tokens.

        Raises:
            UserError: the index gives a place outside the .bin file.
        """
        offset, length, item = (
            int(self.offsets[index]),
            int(self.lengths[index]),
            self.dtype.itemsize,
        )
        start = offset // item
        if offset < 0 or offset % item or length < 0 or start + length > len(self.tokens):
            raise UserError(
                f"{self.index}: sequence {index} is out of range: {length} tokens at byte "
                f"{offset} of {len(self.tokens) * item}",
                exit_code=1,
            )
        return start, start + length

    def stream(self, first: int, last: int) -> "Stream":
        """Return the concatenated documents from `first` to `last` (exclusive)."""
        first, last = int(self.documents[first]), int(self.documents[last])
        if not 0 <= first <= last <= len(self):
            raise UserError(f"{self.index}: the documents' boundaries are not in order")
        return Stream(self, first, last)


class Stream:
    """The tokens of sequences that are contiguous in the .bin file. It supports slicing.

    Slicing raises UserError if the index has no contiguous sequences in that range.

    Args:
        source: file pair that contains the sequences.
        first, last: range of sequences; last is exclusive.

    Attributes:
        start: place of the first sequence in the .bin file, in tokens.
    """

    def __init__(self, source: IndexedTokens, first: int, last: int):
        self.source, self.first, self.last = source, first, last
        self.start = source.place(first)[0] if first < last else 0
        self.stop = source.place(last - 1)[1] if first < last else 0
        self._ends: dict[int, int | None] = {}  # of blocks of sequences
        if self.stop < self.start:
            self._refuse(first, last)

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        if start >= stop:
            return self.source.tokens[:0]
        return self.slices(np.array([start]), stop - start)[0]

    def slices(self, starts: np.ndarray, length: int) -> list[np.ndarray]:
        """Return `length` tokens (at least 1) from each start. They must be within the stream."""
        places = (self.start + starts).tolist()
        # bisect compares the integers of a memoryview in half the time of numpy's. searchsorted
        # would copy the offsets, which are unaligned because of the header.
        offsets = self.source.offsets.view(np.uint8).data.cast("q")
        for start in places:
            self._check(offsets, start, start + length)
        return [self.source.tokens[start : start + length] for start in places]

    def _check(self, offsets: memoryview, start: int, stop: int) -> None:
        """Raise UserError unless contiguous sequences fill the range from start to stop of the .bin
        file, in tokens. offsets: of all sequences, in bytes."""
        item = self.source.dtype.itemsize
        # If the index is not sorted, bisect finds an arbitrary sequence that starts before. The
        # check below then finds that the sequences after it do not fill the slice.
        first = bisect_right(offsets, start * item, self.first, self.last) - 1
        block = first // BLOCK
        while (end := self._end_of(block)) is not None:
            if end >= stop * item:
                return
            block += 1
        last = bisect_left(offsets, stop * item, first + 1, self.last)
        if not self._lie_end_to_end(first, last, stop):
            self._refuse(first, last)

    def _end_of(self, block: int) -> int | None:
        """Return the byte where a block of sequences ends. Each block is checked once.

        None: the block does not exist, or its sequences and the first of the next block are not
        contiguous.
        """
        if block not in self._ends:
            first, last = max(self.first, block * BLOCK), min(self.last, (block + 1) * BLOCK)
            in_order = first < last and self._lie_end_to_end(first, min(self.last, last + 1), 0)
            place, length = self.source.offsets[last - 1], self.source.lengths[last - 1]
            end = int(place) + int(length) * self.source.dtype.itemsize
            self._ends[block] = end if in_order else None
        return self._ends[block]

    def _lie_end_to_end(self, first: int, last: int, stop: int) -> bool:
        begins, held = self.source.offsets[first:last], self.source.lengths[first:last]
        item = self.source.dtype.itemsize
        ends = begins + held.astype(np.int64) * item
        apart = (begins[1:] != ends[:-1]).any()
        return not (apart or ends[-1] < stop * item or held.min() < 0)

    def _refuse(self, first: int, last: int) -> NoReturn:
        raise UserError(
            f"{self.source.index}: sequences {first} to {last - 1} do not follow one another in "
            "the .bin file, which megazoo requires: create both files again with "
            "megazoo preprocess",
            exit_code=1,
        )


def _mapped(path: Path, dtype) -> np.ndarray:
    """Map a file into memory as an array of dtype (empty if the file is empty).

    The result is a plain array: slicing a np.memmap takes ten times as long.
    """
    try:
        return (
            np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype)
        )
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from error


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the dtype of the written tokens for a vocabulary size."""
    return np.dtype(np.uint16 if vocab_size < INT32_FROM else np.int32)


def write_index(
    path: str | Path, lengths: np.ndarray, dtype: np.dtype, documents: np.ndarray | None = None
) -> None:
    """Write the .idx file of sequences that are contiguous in the .bin file, atomically.

    Args:
        path: path of the .idx file.
        lengths: number of tokens of each sequence.
        dtype: dtype of the tokens.
        documents: int64, index of the first sequence of each document, then the number of
            sequences. By default each sequence is a document.
    """
    lengths = np.asarray(lengths, np.int64)
    offsets = np.cumsum(lengths) * dtype.itemsize - lengths * dtype.itemsize
    documents = np.arange(len(lengths) + 1) if documents is None else documents
    code = next(code for code, kind in DTYPES.items() if kind == dtype)
    partial = Path(f"{path}.partial")
    with open_own(partial, truncate=True) as file:
        file.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(documents)))
        for array, kind in ((lengths, "<i4"), (offsets, "<i8"), (documents, "<i8")):
            file.write(np.ascontiguousarray(array, kind).data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
