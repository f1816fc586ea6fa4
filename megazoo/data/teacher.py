"""Files of a teacher's most likely tokens, as `megazoo evaluate --logprobs FILE --top-k K` writes
them.

Nothing here imports torch.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megazoo.constants import IGNORE_INDEX
from megazoo.data.checksums import Fingerprint, fingerprint_of
from megazoo.data.indexed import IndexedTokens, write_index
from megazoo.data.samples import Sample, Vocabulary, sample_of
from megazoo.data.sources import Encoding, Opening, Source
from megazoo.data.text_files import (
    first_object,
    has_objects,
    object_of_line,
    read_chunks,
)
from megazoo.errors import UserError
from megazoo.files import locked, open_own, reason_of
from megazoo.terminal import byte_bar
from megazoo.tokenizer.base import first_token

# The keys of a line and of its cached arrays, with the dtypes of the arrays.
KINDS = {"tokens": "<i4", "top_ids": "<i4", "top_logprobs": "<f4"}
KEYS = tuple(KINDS)
DAMAGE = (OSError, UserError, ValueError)  # raised for a file that is missing or has a wrong size
RULES = 1  # version of the rules that make the arrays, in their names
CHUNK = 1 << 20  # bytes of lines that are read together
ROUNDING = 1e-2  # by which a sum of probabilities may exceed 1


class TopTokens(Source):
    """A file of objects with tokens and, for each, the most likely tokens of a teacher.

    The arrays are cached in FILE.tokens, and created again if the file changes.
    """

    tensors = ("teacher_ids", "teacher_logprobs")

    def __init__(self, name: str):
        super().__init__(name)
        self.path = Path(name)

    def files(self) -> list[tuple[str, Path]]:
        return [(self.path.name, self.path)]

    def prepare(self, encoding: Encoding) -> None:
        cached_top_tokens(self.path)

    def parts(self, opening: Opening) -> list["Windows"]:
        arrays, first = cached_top_tokens(self.path), first_token(opening.tokenizer)
        vocabulary = Vocabulary(opening.vocab_size, opening.tokenizer)
        return [
            Windows(arrays, *part, opening.seq_length, first, vocabulary, self.name)
            for part in opening.ranges(len(arrays.tokens))
        ]

    def note(self, parts: list, encoding: Encoding) -> str:
        arrays = cached_top_tokens(self.path)
        documents, count = len(arrays.tokens), arrays.ids.shape[1]
        return f"{documents:,} documents, with the {count:,} most likely tokens of a teacher"

    def fingerprint(self, encoding: Encoding) -> Fingerprint:
        return fingerprint_of(self.name, [self.path], len(cached_top_tokens(self.path).tokens))


class Arrays(NamedTuple):
    """The arrays of a file, mapped into memory.

    Attributes:
        tokens: the documents.
        ids: the most likely tokens in place of each token of the documents, int32 [tokens, K].
        logprobs: their log-probabilities, float32 [tokens, K].
    """

    tokens: IndexedTokens
    ids: np.ndarray
    logprobs: np.ndarray


class Windows:
    """Windows of documents, as `megazoo evaluate` cuts them.

    A document begins with the tokenizer's first token. A last window that is too short also has
    earlier tokens, which have no targets.

    Args:
        arrays: the documents.
        first, last: range of documents; last is exclusive.
        seq_length: number of input tokens of a window, at most.
        start: token before each document.
        vocabulary: tokens that the model has rows for.
        name: file of the documents, for the error message.
    """

    def __init__(
        self,
        arrays: Arrays,
        first: int,
        last: int,
        seq_length: int,
        start: int,
        vocabulary: Vocabulary,
        name: str,
    ):
        self.arrays, self.first, self.seq_length = arrays, first, seq_length
        self.start, self.vocabulary, self.name = start, vocabulary, name
        lengths = arrays.tokens.lengths[first:last].astype(np.int64)
        self.ends = np.cumsum(-(-lengths // seq_length))  # number of windows up to each document

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, index: int) -> Sample:
        document, begin, wanted, end = self._place(index)
        offset, _ = self.arrays.tokens.place(document)
        tokens, rows = self.arrays.tokens[document], slice(offset + begin, offset + end)
        before = tokens[begin - 1 : begin] if begin else [self.start]
        ids = np.append(before, tokens[begin:end]).astype(np.int64)
        top = self.arrays.ids[rows].astype(np.int64)
        for each in (ids, top):
            self.vocabulary.check(each, self.name, lambda _: f"in document {document + 1:,}")
        sample = sample_of(ids)
        targets = np.where(np.arange(begin, end) < wanted, IGNORE_INDEX, sample.targets)
        named = {"teacher_ids": top, "teacher_logprobs": np.array(self.arrays.logprobs[rows])}
        return sample._replace(targets=targets, named=named)

    def tokens_of(self, index: int) -> int:
        """Return the number of a window's tokens."""
        _, begin, _, end = self._place(index)
        return end - begin

    def _place(self, index: int) -> tuple[int, int, int, int]:
        """Return the document of a window, and the places of its first token, of the first with a
        target, and of its end."""
        number = int(np.searchsorted(self.ends, index, side="right"))
        document, window = self.first + number, index - int(self.ends[number - 1] if number else 0)
        wanted = window * self.seq_length
        end = min(wanted + self.seq_length, int(self.arrays.tokens.lengths[document]))
        return document, max(0, end - self.seq_length), wanted, end


def has_top_tokens(path: Path) -> bool:
    """Return whether the first object of a file has most likely tokens."""
    if not has_objects(path):
        return False
    try:
        _, value = first_object(path)
    except UserError:  # it will be raised when the file is read as text
        return False
    return all(key in value for key in KEYS)


def cached_top_tokens(path: Path) -> Arrays:
    """Return the arrays of a file; create them at the first call, and again if they are damaged.

    If several processes of a machine call this at the same time, only one creates the files.

    Raises:
        UserError: A line is invalid, or the directory is not writable.
    """
    directory, status = Path(f"{path}.tokens"), path.stat()
    facts = json.dumps([status.st_size, status.st_mtime_ns, RULES]).encode()
    prefix = directory / hashlib.blake2b(facts, digest_size=8, person=b"top tokens").hexdigest()
    try:
        with suppress(*DAMAGE):
            return _opened(prefix)
        directory.mkdir(exist_ok=True)
        with locked(Path(f"{prefix}.lock")):
            with suppress(*DAMAGE):  # another process may have made them meanwhile
                return _opened(prefix)
            _write(path, prefix)
            return _opened(prefix)
    except OSError as error:
        raise UserError(
            f"the arrays of {path} can't be written to {directory}: {reason_of(error)}", exit_code=1
        ) from error


def _opened(prefix: Path) -> Arrays:
    """Map the arrays into memory; an error of DAMAGE if a file is missing or has a wrong size."""
    tokens = IndexedTokens(f"{prefix}_tokens")
    maps = (np.memmap(f"{prefix}_{key}.bin", KINDS[key], "r") for key in KEYS[1:])
    ids, logprobs = map(np.asarray, maps)  # slicing a memmap takes longer
    ids = ids.reshape(tokens.lengths.sum(), -1)
    return Arrays(tokens, ids, logprobs.reshape(ids.shape))


def _write(path: Path, prefix: Path) -> None:
    """Write the arrays of a file, then the index of the tokens."""
    lengths, width = [], 0
    with ExitStack() as stack:
        files = [Path(f"{prefix}_{key}.bin") for key in KEYS]
        outputs = [stack.enter_context(open_own(file, truncate=True)) for file in files]
        for place, line in _lines(path):
            try:
                arrays = _arrays_of(object_of_line(line), width)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, {place}: {error}", exit_code=1) from error
            lengths.append(len(arrays[0]))
            width = arrays[1].shape[1]
            for output, array in zip(outputs, arrays, strict=True):
                output.write(array.tobytes())
    if not sum(lengths):
        raise UserError(f"{path} has no tokens")
    write_index(f"{prefix}_tokens.idx", np.array(lengths), np.dtype(np.int32))


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the place and the JSON of each object of a file."""
    with byte_bar(path.stat().st_size, "read") as bar:
        for chunk in read_chunks((str(path),), 0, 0, 0, CHUNK):
            for number, line in enumerate(chunk.data.split(b"\n"), chunk.line):
                if line.strip():
                    yield f"{chunk.unit} {number}", line
            bar.update(chunk.read)


def _arrays_of(value: dict[str, Any], width: int) -> list[np.ndarray]:
    """Return the arrays of an object, in the order of KEYS; ValueError for what is not allowed.

    width: number of most likely tokens in earlier objects; 0 for none.
    """
    arrays = [_array(value, key) for key in KEYS]
    tokens, ids, logprobs = arrays
    if not tokens.size and not ids.size and not logprobs.size:
        return [tokens.reshape(0), ids.reshape(0, width), logprobs.reshape(0, width)]
    shape = (len(tokens), ids.shape[1] if ids.ndim == 2 else 0)
    if tokens.ndim != 1 or ids.shape != shape or logprobs.shape != shape or not shape[1]:
        pairs = zip(KEYS, arrays, strict=True)
        shapes = ", ".join(f"{key} {list(array.shape)}" for key, array in pairs)
        raise ValueError(f"the shapes are {shapes}: use [tokens], [tokens, K] and [tokens, K]")
    if width and shape[1] != width:
        raise ValueError(f"K is {shape[1]}, but {width} in the lines before: use the same K")
    if not (logprobs <= 0).all() or np.isinf(logprobs).any():
        wrong = logprobs[~((logprobs <= 0) & np.isfinite(logprobs))][0]
        raise ValueError(f"top_logprobs has {wrong:g}: it must have finite numbers of at most 0")
    if (total := np.exp(logprobs.astype(np.float64)).sum(1).max()) > 1 + ROUNDING:
        raise ValueError(f"the probabilities of a token add up to {total:.4g}: use at most 1")
    ordered = np.sort(ids, axis=1)
    if (twice := ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]]).size:
        raise ValueError(f"top_ids has the token {twice[0]} twice in place of one token")
    return arrays


def _array(value: dict[str, Any], key: str) -> np.ndarray:
    """Return the numbers under a key; ValueError unless they are a regular list of them."""
    try:
        found = np.array(value.get(key))
    except ValueError:
        raise ValueError(f"{key} has lists of different lengths: use the same K") from None
    kinds, what = ("iuf", "numbers") if key == "top_logprobs" else ("iu", "token ids")
    if found.size and (not found.ndim or found.dtype.kind not in kinds):
        raise ValueError(f"{key} must be a list of {what}")
    if kinds == "iu" and found.size and (found.min() < 0 or found.max() >= 1 << 31):
        wrong = found.min() if found.min() < 0 else found.max()
        raise ValueError(f"{key} has {wrong}: token ids are from 0 to {(1 << 31) - 1}")
    return found.astype(KINDS[key])
