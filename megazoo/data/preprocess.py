"""From raw text to token files: documents are read in chunks, encoded by workers, and written in
their order.

Nothing here imports torch, so that a worker is small and starts at once.
"""

import fcntl
import gzip
import io
import json
import multiprocessing
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megazoo.data.conversations import encode_conversation
from megazoo.data.indexed import dtype_for, write_index
from megazoo.errors import UserError
from megazoo.files import json_object
from megazoo.tokenizer import open_tokenizer

CHUNK = 1 << 20  # bytes of lines that a worker gets at once
SAVED_EVERY = 64  # chunks
LOOSE_JSON = (".jsonl", ".json", ".ndjson")  # one object a line; any other file is one document
COMPRESSED = (".gz", ".zst")
CONVERSATION = ("tokens", "loss_mask")
WRITTEN = (
    "_document.bin",
    "_document.idx",
    "_document.bin.partial",
    "_document.len.partial",
    "_document.idx.partial",
)
# what `preprocess` leaves: never a corpus of its own
WRITTEN += (".progress.json", ".progress.partial")


@dataclass(frozen=True)
class Recipe:
    """What makes the tokens of a corpus. inputs: files, in order. keys: of the JSON objects, each
    written apart.

    chat_template: the lines are conversations, and CONVERSATION are the keys: see
    `encode_conversation`.
    """

    inputs: tuple[str, ...]
    tokenizer: str
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    strict: bool = False
    chat_template: str | None = None


@dataclass
class Progress:
    """How far a corpus is: where reading goes on, and how much is written. sizes, sequences: by
    key."""

    file: int = 0
    offset: int = 0
    line: int = 0
    documents: int = 0
    bad: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)

    def written(self, key: str) -> tuple[int, int]:
        """Bytes of a key's tokens, and of their lengths."""
        return self.sizes.get(key, 0), 4 * self.sequences.get(key, 0)


class Chunk(NamedTuple):
    """Whole lines of a JSONL file, or a whole other file. line: the number of the first; next_line,
    end: the line after them, and where it is in the file, decompressed. read: bytes of the file
    itself that were read for it."""

    file: int
    line: int
    next_line: int
    end: int
    data: bytes
    read: int


class Encoded(NamedTuple):
    """Of a chunk: the tokens of its documents, end to end, and the length of each, by key. bad: the
    number of each line that has no text, and why."""

    documents: int
    tokens: dict[str, np.ndarray]
    lengths: dict[str, list[int]]
    bad: list[tuple[int, str]]


def input_files(paths: list[Path]) -> tuple[str, ...]:
    """The files, and those in the folders, in the order of their names. UserError if there is none.

    Token files in a folder are left out: they are raw bytes, which may well read as text.
    """
    files = []
    for path in paths:
        found = [path]
        if path.is_dir():
            found = sorted(
                p for p in path.rglob("*") if p.is_file() and not p.name.endswith(WRITTEN)
            )
        if not found or not found[0].is_file():
            raise UserError(
                f"{path}: no such file" if not path.is_dir() else f"{path} has no files"
            )
        files += [str(p) for p in found]
    return tuple(files)


def preprocess(
    recipe: Recipe,
    prefix: Path,
    workers: int,
    *,
    progress: Callable[[int], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> Progress:
    """Write PREFIX_KEY_document.bin and .idx for each key, whole or not at all.

    What was interrupted goes on where it stood, if the recipe and its files are the same. progress:
    told the bytes read. say: told of bad lines; with `strict` the first one ends it by UserError.
    workers: processes; 0: this one.
    """
    tokenizer = open_tokenizer(recipe.tokenizer)
    dtype = dtype_for(tokenizer.vocab_size)
    if recipe.append_eod:
        tokenizer.eod  # noqa: B018, raises UserError before any work if there is none
    prefix.parent.mkdir(parents=True, exist_ok=True)
    state = Path(f"{prefix}.progress.json")
    identity = {
        **asdict(recipe),
        "files": [[os.path.getsize(f), os.stat(f).st_mtime_ns] for f in recipe.inputs],
    }
    partial = {
        key: [Path(f"{prefix}_{key}_document.{kind}.partial") for kind in ("bin", "len")]
        for key in recipe.keys
    }
    with ExitStack() as stack:
        files = {}
        for key, paths in partial.items():
            files[key] = [stack.enter_context(_alone(path)) for path in paths]
        done = _resumed(state, json.loads(json.dumps(identity)), partial)
        for key in partial:
            for file, size in zip(files[key], done.written(key), strict=True):
                file.truncate(size)
                file.seek(size)
        encode = stack.enter_context(_workers(recipe, str(dtype), workers))
        for number, (chunk, encoded) in enumerate(encode(_chunks(recipe.inputs, done)), 1):
            for line, reason in encoded.bad:
                what = f"{recipe.inputs[chunk.file]}, line {line}: {reason}"
                if recipe.strict:
                    raise UserError(what, exit_code=1)
                say(what)
            for key, (tokens, lengths) in files.items():
                tokens.write(encoded.tokens[key].data)
                lengths.write(np.array(encoded.lengths[key], "<i4").data)
                done.sizes[key] = done.sizes.get(key, 0) + encoded.tokens[key].nbytes
                done.sequences[key] = done.sequences.get(key, 0) + len(encoded.lengths[key])
            done.file, done.offset, done.line = chunk.file, chunk.end, chunk.next_line
            done.documents, done.bad = (
                done.documents + encoded.documents,
                done.bad + len(encoded.bad),
            )
            progress(chunk.read)
            if number % SAVED_EVERY == 0:
                _save(state, identity, done, [file for pair in files.values() for file in pair])
        for file in (file for pair in files.values() for file in pair):
            file.flush()
        state.unlink(missing_ok=True)  # from here on there is nothing to go on from
        for key, (tokens, lengths) in partial.items():
            final = Path(f"{prefix}_{key}_document")
            Path(f"{final}.idx").unlink(missing_ok=True)  # of tokens that are now replaced
            os.replace(tokens, f"{final}.bin")
            write_index(f"{final}.idx", np.fromfile(lengths, "<i4"), dtype)
            lengths.unlink()
    return done


def _alone(path: Path):
    """A file to read and write, while no other process has it; UserError if one does, as both would
    spoil it."""
    file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115, the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"{path}: another run is writing it", exit_code=1) from None
    return file


def _resumed(state: Path, identity: dict, partial: dict[str, list[Path]]) -> Progress:
    """Where an interrupted run of the same recipe stood, if all that it wrote is there; else the
    start."""
    if state.is_file():
        saved = json_object(state, state.read_bytes())
        if saved.get("recipe") == identity:
            done = Progress(**saved["done"])
            written = (
                (path, size)
                for key in partial
                for path, size in zip(partial[key], done.written(key), strict=True)
            )
            if all(path.is_file() and path.stat().st_size >= size for path, size in written):
                return done
    return Progress()


def _save(state: Path, identity: dict, done: Progress, files: list) -> None:
    for file in files:
        file.flush()
        os.fsync(file.fileno())
    partial = state.with_suffix(".partial")
    partial.write_text(json.dumps({"recipe": identity, "done": asdict(done)}))
    os.replace(partial, state)


# Reading.


def first_object(path: Path) -> tuple[int, dict]:
    """The first object of a JSONL file, and the number of its line; UserError if there is none."""
    try:
        with _opened(path) as (_, file):
            for number, line in enumerate(iter(file.readline, b""), 1):
                if line.strip():
                    return number, _object(line)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number}: {error}") from error
    raise UserError(f"{path} has no lines")


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} can't be read: {getattr(error, 'strerror', None) or error}", exit_code=1
    )


def _chunks(inputs: tuple[str, ...], done: Progress) -> Iterator[Chunk]:
    """What remains of the files, in order."""
    for number in range(done.file, len(inputs)):
        offset, line = (done.offset, done.line) if number == done.file else (0, 0)
        path = Path(inputs[number])
        try:
            yield from _chunks_of(path, number, offset, line)
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(path, error) from error


def _chunks_of(path: Path, number: int, offset: int, line: int) -> Iterator[Chunk]:
    with _opened(path) as (raw, file):
        if file.seekable():
            file.seek(offset)
        else:
            for start in range(0, offset, CHUNK):
                file.read(min(CHUNK, offset - start))
        if not is_loose_json(path):
            if data := file.read():
                yield Chunk(number, 1, 1, len(data), data, raw.tell())
            return
        line, before = line + (not offset), raw.tell() if offset else 0
        while data := file.read(CHUNK):
            data += file.readline()
            offset += len(data)
            after = line + data.count(b"\n")
            yield Chunk(number, line, after, offset, data, raw.tell() - before)
            line, before = after, raw.tell()


@contextmanager
def _opened(path: Path):
    """The file itself, and what is in it, decompressed."""
    with open(path, "rb") as raw:
        if path.suffix.lower() == ".gz":
            with gzip.open(raw) as file:
                yield raw, file
        elif path.suffix.lower() == ".zst":
            try:
                import zstandard
            except ImportError:
                raise UserError(f"{path}: to read .zst, install zstandard") from None
            try:
                yield raw, io.BufferedReader(_Pieces(_frames(raw, zstandard.ZstdDecompressor())))
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
        else:
            yield raw, raw


def _frames(raw, decompressor) -> Iterator[bytes]:
    """What is in the frames of a .zst; EOFError if the last is cut short, which zstandard's own
    reader passes over."""
    frame = None
    while data := raw.read(1 << 16):
        while data:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(data)
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame:
        raise EOFError("Compressed file ended before the end of its last frame")


class _Pieces(io.RawIOBase):
    """Pieces of bytes, end to end, as a file."""

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


def is_loose_json(path: Path) -> bool:
    """Whether a file's name says that it has a JSON object a line."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return name.suffix.lower() in LOOSE_JSON


# Encoding.

_worker: dict = {}  # what a worker process was started with


@contextmanager
def _workers(recipe: Recipe, dtype: str, count: int):
    """A function that encodes chunks, in order, in so many processes; few chunks are under way at
    once."""
    if not count:
        _start(recipe, dtype)
        yield lambda chunks: (
            (chunk, _encode(chunk.data, chunk.line, is_loose_json(Path(recipe.inputs[chunk.file]))))
            for chunk in chunks
        )
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, spawn, _start, (recipe, dtype)) as pool:

        def encode(chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
            waiting: deque = deque()
            for chunk in chunks:
                json_lines = is_loose_json(Path(recipe.inputs[chunk.file]))
                waiting.append(
                    (
                        chunk._replace(data=b""),
                        pool.submit(_encode, chunk.data, chunk.line, json_lines),
                    )
                )
                if len(waiting) > 2 * count:
                    chunk, future = waiting.popleft()
                    yield chunk, future.result()
            for chunk, future in waiting:
                yield chunk, future.result()

        try:
            yield encode
        except BrokenProcessPool as error:  # of a result, or where one is asked for
            raise UserError(
                "a worker died (out of memory?): the same command goes on where it stood",
                exit_code=1,
            ) from error


def _start(recipe: Recipe, dtype: str) -> None:
    _worker.update(recipe=recipe, dtype=np.dtype(dtype), tokenizer=open_tokenizer(recipe.tokenizer))


def _encode(data: bytes, line: int, json_lines: bool) -> Encoded:
    recipe, tokenizer, dtype = _worker["recipe"], _worker["tokenizer"], _worker["dtype"]
    end = np.array([tokenizer.eod] if recipe.append_eod else [], dtype)
    parts, lengths = {key: [] for key in recipe.keys}, {key: [] for key in recipe.keys}
    documents, bad = 0, []
    for number, text in enumerate(data.split(b"\n") if json_lines else [data], line):
        if json_lines and not text.strip():
            continue
        try:
            if recipe.chat_template is not None:
                pair = encode_conversation(tokenizer, _object(text), recipe.chat_template)
                encoded = [np.array(part, dtype) for part in pair]
            else:
                texts = (
                    _texts(text, recipe.keys) if json_lines else [text.decode()] * len(recipe.keys)
                )
                # A special token's name in a document is text.
                encoded = [tokenizer.encode_to_numpy(part, parse_special=False) for part in texts]
        except (ValueError, KeyError, RecursionError, UserError) as error:
            bad.append((number, str(error)))
            continue
        documents += 1
        for key, tokens in zip(recipe.keys, encoded, strict=True):
            if len(tokens):
                parts[key] += [tokens.astype(dtype, copy=False), end]
                lengths[key].append(len(tokens) + len(end))
    tokens = {key: np.concatenate([np.empty(0, dtype), *arrays]) for key, arrays in parts.items()}
    return Encoded(documents, tokens, lengths, bad)


def _object(line: bytes) -> dict:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _texts(line: bytes, keys: tuple[str, ...]) -> list[str]:
    value = _object(line)
    for key in keys:
        if not isinstance(value.get(key), str):
            raise ValueError(f"no text under {key!r}")
    return [value[key] for key in keys]
