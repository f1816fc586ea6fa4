"""Token files as Megatron-LM has them: raw tokens in PREFIX.bin, and in PREFIX.idx where each sequence is.

Layout of .idx, little-endian, without padding: 9 bytes MMIDIDX\\0\\0; u64 version 1; u8 dtype code; u64 N, the number
of sequences; u64 D, the number of documents + 1; int32[N] lengths in tokens; int64[N] byte offsets into .bin; int64[D]
index of the first sequence of each document, and N at the end.
"""

import os
import struct
from pathlib import Path

import numpy as np

from megazoo.errors import UserError

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
INT32_FROM = 65_500  # tokens: smaller vocabularies are written as uint16


class IndexedTokens:
    """The sequences of a .bin and .idx pair, mapped into memory.

    prefix: the files' path without its ending. Raises UserError, naming the file, if one is missing, broken, of
    floating-point tokens (codes 6 and 7), or if the two don't fit each other.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = Path(prefix)
        index, tokens = (Path(f"{prefix}{ending}") for ending in (".idx", ".bin"))
        for path in (index, tokens):
            if not path.is_file():
                raise UserError(f"{path} is missing: {prefix} is not a pair of .bin and .idx")
        data = _mapped(index, np.uint8)
        if len(data) < HEADER.size:
            raise UserError(f"{index} has {len(data)} bytes, fewer than its header")
        magic, version, code, sequences, boundaries = HEADER.unpack(data[: HEADER.size].tobytes())
        if magic != MAGIC or version != 1:
            raise UserError(f"{index} is not an index of version 1 (it begins with {magic!r}, {version})")
        if code not in DTYPES:
            kind = "floating-point numbers" if code in (6, 7) else "unknown"
            raise UserError(f"{index}: dtype code {code} is of {kind}: tokens are integers")
        needed = HEADER.size + 12 * sequences + 8 * boundaries
        if len(data) not in (needed, needed + sequences):  # a byte a sequence more, if it has modes
            raise UserError(f"{index} has {len(data)} bytes, but its header needs {needed}")
        parts = np.split(data[HEADER.size : needed], [4 * sequences, 12 * sequences])
        self.lengths, self.offsets, self.documents = (
            part.view(dtype) for part, dtype in zip(parts, (np.int32, np.int64, np.int64), strict=True)
        )
        self.dtype = np.dtype(DTYPES[code])
        self._check(index, tokens)
        self.tokens = _mapped(tokens, self.dtype)

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """The tokens of a sequence."""
        start = int(self.offsets[index]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[index])]

    def stream(self, first: int, last: int) -> tuple[np.ndarray, int]:
        """The tokens of the documents from `first` until before `last`, end to end, and where they begin in the .bin.

        UserError if they don't lie end to end there.
        """
        first, last = int(self.documents[first]), int(self.documents[last])
        if first == last:
            return self.tokens[:0], 0
        lengths, offsets = self.lengths[first:last].astype(np.int64), self.offsets[first:last] // self.dtype.itemsize
        if (offsets[1:] != offsets[:-1] + lengths[:-1]).any():
            raise UserError(f"{self.prefix}.idx: the sequences don't lie end to end in the .bin")
        return self.tokens[offsets[0] : offsets[-1] + lengths[-1]], int(offsets[0])

    def _check(self, index: Path, tokens: Path) -> None:
        size, item = tokens.stat().st_size, self.dtype.itemsize
        if len(self) and (self.lengths.min() < 0 or self.offsets.min() < 0 or (self.offsets % item).any()):
            raise UserError(f"{index} has lengths or offsets that can't be")
        end = int(self.offsets.max(initial=0))
        if end <= size:  # else the sum could overflow
            end = int((self.offsets + self.lengths.astype(np.int64) * item).max(initial=0))
        if end > size or size % item:
            raise UserError(f"{tokens} has {size} bytes, but {index} needs {end}, in tokens of {item}")
        ends = self.documents[[0, -1]].tolist() if len(self.documents) else []
        if ends != [0, len(self)] or (np.diff(self.documents) < 0).any():
            raise UserError(f"{index}: the documents' boundaries don't go from 0 to its {len(self)} sequences")


def _mapped(path: Path, dtype) -> np.ndarray:
    """The file as an array of dtype; of a file without bytes, an empty one."""
    try:
        return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from error


def dtype_for(vocab_size: int) -> np.dtype:
    """The dtype in which tokens of such a vocabulary are written."""
    return np.dtype(np.uint16 if vocab_size < INT32_FROM else np.int32)


def write_index(path: str | Path, lengths: np.ndarray, dtype: np.dtype, documents: np.ndarray | None = None) -> None:
    """Write the .idx of sequences that lie end to end in the .bin, whole or not at all.

    lengths: tokens of each sequence. documents: int64, the first sequence of each document, and the number of sequences
    at the end; by default each sequence is a document.
    """
    lengths = np.asarray(lengths, np.int64)
    offsets = np.cumsum(lengths) * dtype.itemsize - lengths * dtype.itemsize
    documents = np.arange(len(lengths) + 1) if documents is None else documents
    code = next(code for code, kind in DTYPES.items() if kind == dtype)
    partial = Path(f"{path}.partial")
    with open(partial, "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(documents)))
        for array, kind in ((lengths, "<i4"), (offsets, "<i8"), (documents, "<i8")):
            file.write(np.ascontiguousarray(array, kind).data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
