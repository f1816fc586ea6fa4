"""Text files are read in chunks: JSONL by whole lines, any other file whole. They may be
compressed. Files that are streamed are only named here."""

import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from megazoo.errors import UserError
from megazoo.files import regular_file, without_mark

LOOSE_JSON = (".jsonl", ".json", ".ndjson")  # one object a line; any other file is one document
PLAIN_TEXT = (".txt",)  # what training reads beside JSONL
STREAM = "stream:"  # before the files of a streamed source
COMPRESSED = (".gz", ".zst")


class Chunk(NamedTuple):
    """Whole lines of a JSONL file, or a whole other file.

    file: its place among the inputs. line: the number of the chunk's first line. next_line, end:
    the number of the line after it, and where that begins in the file, decompressed, in bytes.
    read: bytes of the file itself that were read for it.
    """

    file: int
    line: int
    next_line: int
    end: int
    data: bytes
    read: int


def read_chunks(
    inputs: tuple[str, ...], file: int, offset: int, line: int, size: int
) -> Iterator[Chunk]:
    """Yield the chunks of the inputs in order, each of `size` bytes and what its last line lacks.

    Reading begins in file number `file` at the byte `offset`, where line number `line` begins.
    """
    for number in range(file, len(inputs)):
        begin = (offset, line) if number == file else (0, 0)
        path = Path(inputs[number])
        try:
            yield from _chunks_of(path, number, *begin, size)
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(path, error) from error


def _chunks_of(path: Path, number: int, offset: int, line: int, size: int) -> Iterator[Chunk]:
    with _opened(path) as (raw, file):
        if file.seekable():
            file.seek(offset)
        else:
            for start in range(0, offset, size):
                file.read(min(size, offset - start))
        if not is_loose_json(path):
            if data := file.read():
                yield Chunk(number, 1, 1, len(data), without_mark(data), raw.tell())
            return
        line, before = line + (not offset), raw.tell() if offset else 0
        while data := file.read(size):
            data += file.readline()
            offset += len(data)
            after = line + data.count(b"\n")
            yield Chunk(number, line, after, offset, data, raw.tell() - before)
            line, before = after, raw.tell()


def is_loose_json(path: Path) -> bool:
    """Return whether a file's name says that each of its lines is a JSON object."""
    return _kind_of(path) in LOOSE_JSON


def is_text(path: Path) -> bool:
    """Return whether a file is there whose name says that training can read it: JSONL, or plain
    text. Token files with that prefix come before it."""
    has_tokens = Path(f"{path}.idx").is_file()
    return _kind_of(path) in (*LOOSE_JSON, *PLAIN_TEXT) and path.is_file() and not has_tokens


def _kind_of(path: Path) -> str:
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return name.suffix.lower()


def is_streamed(name: str) -> bool:
    """Return whether a source is read by `datasets`: "stream:" and files, or a .parquet file."""
    is_parquet = _kind_of(Path(name)) == ".parquet" and not os.path.isfile(f"{name}.idx")
    return name.startswith(STREAM) or is_parquet


def builder_of_stream(name: str) -> str:
    """Return which of `datasets`' builders reads a streamed source; UserError if none does."""
    kind = _kind_of(Path(name.removeprefix(STREAM)))
    if kind == ".parquet":
        return "parquet"
    if kind in LOOSE_JSON:
        return "json"
    raise UserError(
        f"data {name!r}: the names of streamed files must end in .parquet or .jsonl "
        "(also .jsonl.gz and .jsonl.zst)"
    )


def files_of_stream(name: str) -> list[str]:
    """Return the files of a streamed source, in order: a path, or a pattern such as dir/*.parquet.

    A URL, such as hf://datasets/org/name/*.parquet, is one entry. UserError if there is no file.
    """
    pattern = name.removeprefix(STREAM)
    if "://" in pattern or os.path.isfile(pattern):
        return [pattern]
    files = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
    if not files:
        raise UserError(f"data {name!r}: there is no such file")
    return files


def first_object(path: Path) -> tuple[int, dict]:
    """Return the number of the first line of a JSONL file that is not empty, and its object;
    UserError if there is none."""
    number = 0
    try:
        with _opened(path) as (_, file):
            for number, line in enumerate(iter(file.readline, b""), 1):
                if line.strip():
                    return number, object_of_line(line)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number}: {error}") from error
    raise UserError(f"{path} has no lines")


def object_of_line(line: bytes) -> dict:
    """Return the JSON object that a line is; ValueError if it is none."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} can't be read: {getattr(error, 'strerror', None) or error}", exit_code=1
    )


@contextmanager
def _opened(path: Path):
    """Open a file: the file itself, and a file of its contents, decompressed."""
    with open(regular_file(path), "rb") as raw:
        if path.suffix.lower() == ".gz":
            with gzip.open(raw) as file:
                yield raw, file
        elif path.suffix.lower() == ".zst":
            try:
                import zstandard
            except ImportError:
                raise UserError(f"{path}: to read .zst, install zstandard") from None
            frames = _frames(raw, zstandard.ZstdDecompressor())
            try:
                yield raw, io.BufferedReader(_FileOfPieces(frames))
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
        else:
            yield raw, raw


def _frames(raw, decompressor) -> Iterator[bytes]:
    """Yield the contents of the frames of a .zst; EOFError if the last is cut short, which
    zstandard's own reader does not notice."""
    frame = None
    while data := raw.read(1 << 16):
        while data:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(data)
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame:
        raise EOFError("Compressed file ended before the end of its last frame")


class _FileOfPieces(io.RawIOBase):
    """Reads pieces of bytes, end to end, as one file."""

    def __init__(self, pieces: Iterator[bytes]):
        self._pieces, self._rest = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
