"""Tokenize text into token files: read documents in chunks, encode them, and write them in order.

This module does not import torch, so that `megazoo preprocess` starts quickly.
"""

import fcntl
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from megazoo.data.encoding import Encoded, Recipe, encoding_workers
from megazoo.data.indexed import dtype_for, write_index
from megazoo.data.text_files import Chunk, RowReader, read_chunks
from megazoo.errors import UserError
from megazoo.files import json_object, open_own, regular_file
from megazoo.tokenizer import open_tokenizer

CHUNK = 1 << 20  # bytes of lines that a worker gets at a time
SAVED_EVERY = 64  # chunks
# Suffixes of files that `preprocess` writes. They are never inputs.
WRITTEN = (
    "_document.bin",
    "_document.idx",
    "_document.bin.partial",
    "_document.len.partial",
    "_document.idx.partial",
    ".progress.json",
    ".progress.partial",
)


@dataclass
class CorpusProgress:
    """Progress of a corpus: where reading resumes, and how much is written.

    file, offset, line: see `read_chunks`. documents, bad: number of encoded and of skipped lines.
    sizes, sequences: bytes of tokens and number of sequences, by key.
    """

    file: int = 0
    offset: int = 0
    line: int = 0
    documents: int = 0
    bad: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)

    def written(self, key: str) -> tuple[int, int]:
        """Return the bytes of a key's tokens, and of their lengths."""
        return self.sizes.get(key, 0), 4 * self.sequences.get(key, 0)

    def add(self, chunk: Chunk, encoded: Encoded) -> None:
        """Add a written chunk to the progress."""
        self.file, self.offset, self.line = chunk.file, chunk.end, chunk.next_line
        self.documents += encoded.documents
        self.bad += len(encoded.bad)
        for key, tokens in encoded.tokens.items():
            self.sizes[key] = self.sizes.get(key, 0) + tokens.nbytes
            self.sequences[key] = self.sequences.get(key, 0) + len(encoded.lengths[key])


def input_files(paths: list[Path]) -> tuple[str, ...]:
    """Return the input files, including those in folders, in the order of their names.

    Token files in a folder are skipped: their raw bytes could be read as text. UserError if a file
    does not exist, or a folder has no files.
    """
    files = []
    for path in paths:
        found = [path]
        if path.is_dir():
            found = sorted(
                p for p in path.rglob("*") if p.is_file() and not p.name.endswith(WRITTEN)
            )
        if not found or not regular_file(found[0]).is_file():
            raise UserError(
                f"{path}: no such file"
                if not path.is_dir()
                else f"{path} has no text files (token files are skipped)"
            )
        files += [str(p) for p in found]
    return tuple(files)


def preprocess(
    recipe: Recipe,
    prefix: Path,
    workers: int,
    *,
    progress: Callable[[int], object] = lambda _: None,
    report: Callable[[str], None] = lambda _: None,
    rows: RowReader | None = None,
) -> CorpusProgress:
    """Write PREFIX_KEY_document.bin and .idx for each key, completely or not at all.

    An interrupted call is resumed if the recipe and its files are the same.

    Args:
        recipe: Inputs and settings.
        prefix: Prefix of the output files.
        workers: Number of worker processes; 0 uses this process.
        progress: Called with the number of bytes read.
        report: Called with a line for each line without text.
        rows: Reads the only input, if megazoo has no reader for its kind.

    Raises:
        UserError: The recipe is strict, and a line has no text.
    """
    tokenizer = open_tokenizer(recipe.tokenizer)
    dtype = dtype_for(tokenizer.vocab_size)
    if recipe.append_eod:
        tokenizer.eod  # noqa: B018, raises UserError early if the tokenizer has none
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        output = _Output(recipe, prefix, dtype, stack)
        done = output.progress
        encode = stack.enter_context(encoding_workers(recipe, dtype, workers))
        chunks = read_chunks(recipe.inputs, done.file, done.offset, done.line, CHUNK, rows)
        for number, (chunk, encoded) in enumerate(encode(chunks), 1):
            _tell_bad_lines(recipe, chunk, encoded, report)
            output.write(encoded)
            done.add(chunk, encoded)
            progress(chunk.read)
            if number % SAVED_EVERY == 0:
                output.save_progress()
        output.finish()
    return done


def _tell_bad_lines(recipe: Recipe, chunk: Chunk, encoded: Encoded, report: Callable) -> None:
    """Report the lines of a chunk without text; UserError for the first if the recipe is strict."""
    path = recipe.inputs[chunk.file]
    unit = "paragraph" if recipe.paragraphs and not chunk.objects else chunk.unit
    for line, reason in encoded.bad:
        told = f"{path}, {unit} {line}: {reason}"
        if recipe.strict:
            raise UserError(told, exit_code=1)
        report(told)


class _Output:
    """The token files of a recipe while they are written.

    Each key has a file of tokens and a file of their lengths. They get their final names and an
    index when they are complete. A progress file lets the next run of the same recipe resume. While
    the stack is open, no other process can open the files.
    """

    def __init__(self, recipe: Recipe, prefix: Path, dtype: np.dtype, stack: ExitStack):
        self.prefix, self.dtype = prefix, dtype
        self.state = Path(f"{prefix}.progress.json")
        files = [[os.path.getsize(f), os.stat(f).st_mtime_ns] for f in recipe.inputs]
        # as it reads back from JSON
        self.identity = json.loads(json.dumps({**asdict(recipe), "files": files}))
        self.partial = {
            key: [Path(f"{prefix}_{key}_document.{kind}.partial") for kind in ("bin", "len")]
            for key in recipe.keys
        }
        self.files = {
            key: [stack.enter_context(_open_alone(path)) for path in paths]
            for key, paths in self.partial.items()
        }
        self.progress = self._resumed()
        for key, files in self.files.items():
            for file, size in zip(files, self.progress.written(key), strict=True):
                file.truncate(size)
                file.seek(size)

    def _resumed(self) -> CorpusProgress:
        """Return the progress of an interrupted run of the same recipe if all its output exists;
        otherwise the initial progress."""
        if not self.state.is_file():
            return CorpusProgress()
        saved = json_object(self.state, self.state.read_bytes())
        if saved.get("recipe") != self.identity:
            return CorpusProgress()
        done = CorpusProgress(**saved["done"])
        for key, paths in self.partial.items():
            for path, size in zip(paths, done.written(key), strict=True):
                if not path.is_file() or path.stat().st_size < size:
                    return CorpusProgress()
        return done

    def write(self, encoded: Encoded) -> None:
        """Append the tokens of a chunk, and their lengths."""
        for key, (tokens, lengths) in self.files.items():
            tokens.write(encoded.tokens[key].data)
            lengths.write(np.array(encoded.lengths[key], "<i4").data)

    def save_progress(self) -> None:
        """Flush the output to disk, then write the progress file."""
        self._sync()
        partial = self.state.with_suffix(".partial")
        with open_own(partial, truncate=True) as file:
            text = json.dumps({"recipe": self.identity, "done": asdict(self.progress)})
            file.write(text.encode())
        os.replace(partial, self.state)

    def finish(self) -> None:
        """Rename the files to their final names, and write their indices."""
        self._sync()
        self.state.unlink(missing_ok=True)  # from here on, the run cannot be resumed
        for key, (tokens, lengths) in self.partial.items():
            final = Path(f"{self.prefix}_{key}_document")
            Path(f"{final}.idx").unlink(missing_ok=True)  # index of the old tokens
            os.replace(tokens, f"{final}.bin")
            counts = np.fromfile(lengths, "<i4")
            lengths.unlink()  # before the index, which marks the output as complete
            write_index(f"{final}.idx", counts, self.dtype)

    def _sync(self) -> None:
        """Flush the output to disk."""
        for pair in self.files.values():
            for file in pair:
                file.flush()
                os.fsync(file.fileno())


def _open_alone(path: Path):
    """Open a file for reading and writing, and lock it; UserError if another process has locked
    it."""
    file = open_own(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"{path}: another run is writing it", exit_code=1) from None
    return file
