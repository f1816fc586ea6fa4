"""Read text files in chunks: JSONL in complete lines, JSON arrays and .parquet as lines of JSONL,
other files as a whole. They may be compressed."""

import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from megazoo.errors import UserError
from megazoo.files import check_whole, without_mark

LOOSE_JSON = (".jsonl", ".json", ".ndjson")  # one object per line, or one array of objects
PARQUET = ".parquet"
ROWS = 1024  # of a .parquet file that are read together
LINE, ITEM, ROW = "line", "item", "row"  # the units of files with objects
BLANK = re.compile(r"[ \t\n\r]*")  # between the values of JSON
PLAIN_TEXT = (".txt",)  # training reads these and JSONL
COMPRESSED = (".gz", ".zst")
END = object()  # after the last value of a file
RowReader = Callable[[], Iterable[dict[str, Any]]]


class Chunk(NamedTuple):
    """Complete lines of a JSONL file, the items of an array or the rows of .parquet as such lines,
    or another complete file.

    file: index among the inputs. line: number of the first line of the chunk. next_line, end:
    number of the next line, and its offset in the decompressed file, in bytes; for items and rows,
    the offset is a number of items or rows. read: number of bytes read from the file on disk. unit:
    LINE, ITEM or ROW. objects: whether the lines are JSON objects.
    """

    file: int
    line: int
    next_line: int
    end: int
    data: bytes
    read: int
    unit: str = LINE
    objects: bool = True


def read_chunks(
    inputs: tuple[str, ...],
    file: int,
    offset: int,
    line: int,
    size: int,
    rows: RowReader | None = None,
) -> Iterator[Chunk]:
    """Yield the chunks of the inputs in order, each of `size` bytes plus the rest of its last line.

    Reading starts in file number `file` at `offset`, where line number `line` starts: see `Chunk`.
    rows: reads the only file, if it is of another kind.
    """
    for number in range(file, len(inputs)):
        begin = (offset, line) if number == file else (0, 0)
        path = Path(inputs[number])
        try:
            yield from _chunks_of(path, number, *begin, size, rows)
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise _unreadable(path, error) from error


def _chunks_of(
    path: Path, number: int, offset: int, line: int, size: int, rows: RowReader | None
) -> Iterator[Chunk]:
    unit = ROW if rows else _unit_of(path)
    if unit != LINE:
        values = rows() if rows else _values_of(path, unit)
        yield from _chunks_of_values(path, values, number, offset, size, unit)
        return
    with _opened(path) as (raw, file):
        if file.seekable():
            file.seek(offset)
        else:
            for start in range(0, offset, size):
                file.read(min(size, offset - start))
        if not has_objects(path):
            if data := file.read():
                data = without_mark(data)
                yield Chunk(number, 1, 1, len(data), data, raw.tell(), objects=False)
            return
        line, before = line + (not offset), raw.tell() if offset else 0
        while data := file.read(size):
            data += file.readline()
            offset += len(data)
            after = line + data.count(b"\n")
            yield Chunk(number, line, after, offset, data, raw.tell() - before)
            line, before = after, raw.tell()


def _chunks_of_values(
    path: Path, values: Iterable, number: int, offset: int, size: int, unit: str
) -> Iterator[Chunk]:
    """Yield the chunks of a file of items or rows, from number `offset` of them."""
    read = os.path.getsize(path)
    values = islice(values, offset, None)
    for first in values:
        lines = [json.dumps(first, default=str).encode()]
        held = len(lines[0])
        while held < size and (value := next(values, END)) is not END:
            lines.append(json.dumps(value, default=str).encode())
            held += len(lines[-1])
        start, offset = offset, offset + len(lines)
        yield Chunk(number, start + 1, offset + 1, offset, b"\n".join(lines), read, unit)
        read = 0


def _values_of(path: Path, unit: str) -> Iterator[Any]:
    """Yield the values of a file of items or rows."""
    if unit == ROW:
        yield from _rows_of(path)
        return
    with _opened(path) as (_, file):
        data = without_mark(file.read())
    try:
        yield from _values_in(data.decode())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: {error.msg}", exit_code=1) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: {error}", exit_code=1) from error


def _values_in(text: str) -> Iterator[Any]:
    """Yield the items of a JSON array, or consecutive JSON values; JSONDecodeError for other
    text."""
    decode, place = json.JSONDecoder().raw_decode, _after_blanks(text, 0)
    in_array = text[place : place + 1] == "["
    if in_array:
        place = _after_blanks(text, place + 1)
        if text[place : place + 1] == "]":
            in_array, place = False, _check_end(text, place + 1)
    while in_array or place < len(text):
        value, place = decode(text, place)
        yield value
        place = _after_blanks(text, place)
        if not in_array:
            continue
        if text[place : place + 1] == "]":
            in_array, place = False, _check_end(text, place + 1)
        elif text[place : place + 1] == ",":
            place = _after_blanks(text, place + 1)
        else:
            raise json.JSONDecodeError("Expecting ',' delimiter", text, place)


def _after_blanks(text: str, place: int) -> int:
    blanks = BLANK.match(text, place)
    return blanks.end() if blanks else place


def _check_end(text: str, place: int) -> int:
    """Return the end of the text; JSONDecodeError if more than blanks is left."""
    place = _after_blanks(text, place)
    if place < len(text):
        raise json.JSONDecodeError("Extra data", text, place)
    return place


def _rows_of(path: Path) -> Iterator[dict]:
    """Yield the rows of a .parquet file, without the keys that are null."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(f"{path}: to read .parquet, install pyarrow") from None
    try:
        for rows in parquet.ParquetFile(check_whole(path)).iter_batches(ROWS):
            yield from map(_plain, rows.to_pylist())
    except (ValueError, OverflowError, TypeError, ArrowException) as error:
        raise UserError(f"{path} can't be read: {error}", exit_code=1) from error


def _plain(value: Any) -> Any:
    """Return a value of a row without the keys that are null, because all rows of a column have the
    same keys. Bytes become text; UnicodeDecodeError if they are not UTF-8."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items() if part is not None}
    if isinstance(value, bytes):
        return value.decode()
    return [_plain(part) for part in value] if isinstance(value, list) else value


def _unit_of(path: Path) -> str:
    """Return ROW for a .parquet file, ITEM for a JSON file that is one array or whose first line is
    the beginning of an array or object, and LINE for other files. A line that is a list is an array
    only in a .json file, or if the file has no other line.
    """
    if _is_parquet(path):
        return ROW
    if kind_of(path) not in LOOSE_JSON:
        return LINE
    with _opened(path) as (_, file):
        lines = filter(None, (line.strip() for line in iter(file.readline, b"")))
        first = without_mark(next(lines, b""))
        try:
            is_list = isinstance(json.loads(first), list)
            alone = kind_of(path) == ".json" or next(lines, None) is None
            return ITEM if is_list and alone else LINE
        except json.JSONDecodeError as error:
            starts = first.startswith((b"{", b"[")) and error.pos >= len(error.doc.rstrip(" ,"))
            # An object is not a key: then the first line is a truncated line of JSONL.
            is_truncated = (
                kind_of(path) != ".json" and first.startswith(b"{") and _is_object(next(lines, b""))
            )
            return ITEM if starts and not is_truncated else LINE
        except (ValueError, RecursionError):  # an error of this line
            return LINE


def _is_object(line: bytes) -> bool:
    """Return whether a line is a JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == PARQUET


def has_objects(path: Path) -> bool:
    """Return whether the name of a file is that of a file of objects: JSONL, JSON or .parquet."""
    return kind_of(path) in LOOSE_JSON or _is_parquet(path)


def is_text(path: Path) -> bool:
    """Return whether a path is a file of objects or plain text whose tokens are cached. False if
    token files have this prefix: they take precedence."""
    is_kind = kind_of(path) in (*LOOSE_JSON, *PLAIN_TEXT) or _is_parquet(path)
    return is_kind and path.is_file() and not has_tokens(path)


def has_tokens(path: Path) -> bool:
    """Return whether the name of a file is also the prefix of token files."""
    return Path(f"{path}.idx").is_file()


def kind_of(path: Path) -> str:
    """Return the suffix of a file in lower case, without that of its compression."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return name.suffix.lower()


def first_object(path: Path, rows: RowReader | None = None) -> tuple[str, dict]:
    """Return the first object of a file of objects, and its place, such as "line 1"; UserError for
    an empty file. rows: reads a file of another kind."""
    number, unit = 0, LINE
    try:
        unit = ROW if rows else _unit_of(path)
        if unit == LINE:
            with _opened(path) as (_, file):
                for number, line in enumerate(iter(file.readline, b""), 1):
                    if line.strip():
                        return f"{unit} {number}", object_of_line(line)
        else:
            for number, value in enumerate(rows() if rows else _values_of(path, unit), 1):
                return f"{unit} {number}", _object(value)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, {unit} {number}: {error}") from error
    raise UserError(f"{path} has no {unit}s")


def object_of_line(line: bytes) -> dict:
    """Return the JSON object in a line; ValueError if it is not one."""
    return _object(json.loads(line))


def _object(value: Any) -> dict:
    if isinstance(value, list):
        raise ValueError('not a JSON object but a list: a conversation is {"messages": [...]}')
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
