"""Read text files in chunks: JSONL in complete lines, other files as a whole. They may be
compressed. Streamed files are only named here."""

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
from megazoo.files import check_whole, without_mark

LOOSE_JSON = (".jsonl", ".json", ".ndjson")  # one object per line; any other file is one document
PLAIN_TEXT = (".txt",)  # training reads these and JSONL
STREAM = "stream:"  # prefix of a streamed source
COMPRESSED = (".gz", ".zst")


class Chunk(NamedTuple):
    """Complete lines of a JSONL file, or another complete file.

    file: index among the inputs. line: number of the first line of the chunk. next_line, end:
    number of the next line, and its offset in the decompressed file, in bytes. read: number of
    bytes read from the file on disk.
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
    """Yield the chunks of the inputs in order, each of `size` bytes plus the rest of its last line.

    Reading starts in file number `file` at byte `offset`, the start of line number `line`.
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
    """Return whether the name of a file is that of a JSONL file."""
    return _kind_of(path) in LOOSE_JSON


def is_text(path: Path) -> bool:
    """Return whether a path is a JSONL or plain text file. False if token files have this prefix:
    they take precedence."""
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
    """Return the builder of `datasets` for a streamed source; UserError if there is none."""
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

    A URL, such as hf://datasets/org/name/*.parquet, is one entry. UserError if no file matches.
    """
    pattern = name.removeprefix(STREAM)
    if "://" in pattern or os.path.isfile(pattern):
        return [pattern]
    files = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
    if not files:
        raise UserError(f"data {name!r}: no such file")
    return files


def first_object(path: Path) -> tuple[int, dict]:
    """Return the line number and the object of the first non-empty line of a JSONL file; UserError
    for an empty file."""
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
    """Return the JSON object in a line; ValueError if it is not one."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} can't be read: {getattr(error, 'strerror', None) or error}", exit_code=1
    )


@contextmanager
def _opened(path: Path):
    """Open a file: the file itself, and a file of its contents, decompressed."""
    with open(check_whole(path), "rb") as raw:
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
    """Yield the contents of the frames of a .zst file; EOFError if the last frame is truncated,
    which the reader of zstandard does not detect."""
    frame = None
    while data := raw.read(1 << 16):
        while data:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(data)
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame:
        raise EOFError("Compressed file ended before the end of its last frame")


class _FileOfPieces(io.RawIOBase):
    """Reads concatenated chunks of bytes as one file."""

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
