"""Text of any size, streamed with the package `datasets` and tokenized during training."""

import glob
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from megazoo.data.formats import reader_for
from megazoo.data.order import interleaved, shares_of, shuffled
from megazoo.data.samples import Sample, Vocabulary, sample_of
from megazoo.data.sources import Encoding, Opening, Source
from megazoo.data.text_files import LOOSE_JSON, PARQUET, has_tokens, kind_of
from megazoo.errors import UserError
from megazoo.files import brief
from megazoo.lazy import is_installed
from megazoo.parallel.random import derive_seed
from megazoo.terminal import note_rank_0
from megazoo.tokenizer import Tokenizer

STREAM = "stream:"  # prefix of a streamed source
COLUMN = "text"
BLOCK_TOKENS = 1 << 20  # tokens of the samples that are shuffled together
READ_TOGETHER = 16  # samples per block if not shuffled
KEPT_BLOCKS = 8  # blocks of BLOCK_TOKENS in memory
KEPT_POSITIONS = 1024
DEALT = 4096  # documents that are assigned to the parts together


class Streamed(Source):
    """Files that the package `datasets` reads during training: "stream:" and files, or .parquet
    files, except a local file of conversations."""

    streamed = True

    @classmethod
    def accepts(cls, name: str) -> bool:
        path = Path(name)
        is_parquet = kind_of(path) == PARQUET
        return name.startswith(STREAM) or (
            is_parquet and not has_tokens(path) and not _has_conversations(path)
        )

    def check(self) -> None:
        builder_of_stream(self.name)
        files_of_stream(self.name)
        if not is_installed("datasets"):
            raise UserError(
                f"data {self.name!r} needs the package datasets; "
                "in the clone of megazoo: pip install -e '.[datasets]'"
            )

    def files(self) -> list[tuple[str, Path]]:
        """Return the local files."""
        files = (Path(file) for file in files_of_stream(self.name) if os.path.isfile(file))
        return [(file.name, file) for file in files]

    def prepare(self, encoding: Encoding) -> None:
        TextStream(self.name)

    def parts(self, opening: Opening) -> list["StreamedTexts | None"]:
        dealt = [share for share in opening.shares if share]
        numbers = iter(range(len(dealt)))
        place = Position.of(opening.position) if opening.position else None
        return [
            StreamedTexts(
                self.name,
                opening.tokenizer,
                dealt,
                next(numbers),
                opening.seq_length,
                seed=None if part else opening.seed,
                eod=opening.eod,
                position=None if part else place,
                vocab_size=opening.vocab_size,
            )
            if share
            else None
            for part, share in enumerate(opening.shares)
        ]

    def note(self, parts: list, encoding: Encoding) -> str:
        return f"streamed, shuffled within blocks of {parts[0].block:,} samples"


def _has_conversations(path: Path) -> bool:
    """Return whether a .parquet file has columns of conversations, and no texts."""
    if not path.is_file():
        return False
    try:
        from pyarrow import parquet

        columns = parquet.read_schema(path).names
    except (ImportError, OSError, ValueError):  # `datasets` will print the error
        return False
    return "text" not in columns and reader_for(columns) is not None


def builder_of_stream(name: str) -> str:
    """Return the builder of `datasets` for a streamed source; UserError for other files."""
    kind = kind_of(Path(name.removeprefix(STREAM)))
    if kind == PARQUET:
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


@dataclass(frozen=True)
class Position:
    """The start of a block of samples in a stream.

    Attributes:
        sample: number of the first sample of the block.
        epoch: number of the pass over the stream.
        document: number of the block's first document in that pass.
        tokens: number of tokens of that document before the block.
        state: state of `datasets` before that document.
        version: version of `datasets` that wrote the state. Other versions cannot use the state.
            Without a usable state, earlier documents are read and skipped.
    """

    sample: int = 0
    epoch: int = 0
    document: int = 0
    tokens: int = 0
    state: dict[str, Any] | None = None
    version: str = ""

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Position":
        """Return a position from a checkpoint. Unknown keys, from other versions, are ignored."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


class TextStream:
    """The documents of a source, in order, read with `datasets`.

    Raises:
        UserError: the source cannot be opened.
    """

    def __init__(self, name: str):
        self.name, self.is_json = name, builder_of_stream(name) == "json"
        try:
            datasets = import_module("datasets")
            # By default, `datasets` contacts the hub even for local files, and logs errors.
            datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
            datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
            files = [file if "://" in file else glob.escape(file) for file in files_of_stream(name)]
            # JSONL is parsed below: `datasets` requires the same columns for every line.
            builder, columns = ("text", {}) if self.is_json else ("parquet", {"columns": [COLUMN]})
            how = {"data_files": files, "split": "train", "streaming": True}
            try:
                self.stream = datasets.load_dataset(builder, **how, **columns)
                self.version, self._beginning = datasets.__version__, self.stream.state_dict()
                first = next(iter(self.stream), None)
            except ValueError:
                self._check_columns(datasets.load_dataset(builder, **how).column_names or [])
                raise
        except UserError:
            raise
        except Exception as error:
            raise self._unreadable(error) from error
        if first and self.is_json:
            self._check_columns(self._object(0, first[COLUMN]))

    def read(self, start: Position) -> Iterator[tuple[Position, str | None]]:
        """Yield the position and text of each document from `start`. A missing text is None."""
        number, state = 0, self._beginning
        if start.state and start.version == self.version:
            number, state = start.document, start.state
        try:
            self.stream.load_state_dict(state)
            for value in self.stream:
                if number >= start.document:
                    place = Position(0, start.epoch, number, 0, state, self.version)
                    yield place, self._text(number, value[COLUMN])
                number, state = number + 1, self.stream.state_dict()
        except UserError:
            raise
        except Exception as error:
            raise self._unreadable(error) from error

    def _text(self, number: int, value: Any) -> str | None:
        """Return the text of a document, or None if it is empty or missing."""
        if self.is_json:
            value = self._object(number, value).get(COLUMN) if value.strip() else None
        if value is None or value == "":
            return None
        if not isinstance(value, str):
            raise UserError(
                f"data {self.name!r}, document {number + 1}: its {COLUMN} is not a string: "
                f"{brief(value)}",
                exit_code=1,
            )
        return value

    def _object(self, number: int, line: str) -> dict[str, Any]:
        """Parse a JSONL line as an object."""
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            value = error
        if not isinstance(value, dict):
            told = value if isinstance(value, Exception) else "it is not an object"
            raise UserError(f"data {self.name!r}, document {number + 1}: {told}", exit_code=1)
        return value

    def _check_columns(self, columns) -> None:
        """Raise UserError if the documents have no text column."""
        if COLUMN not in columns:
            found = ", ".join(map(str, list(columns)[:20])) or "none"
            hint = ""
            if reader_for(columns):
                hint = "; conversations cannot be streamed: pass each file to --data by its name"
            raise UserError(
                f"data {self.name!r} has no column {COLUMN!r}; its columns are: {found}{hint}"
            )

    def _unreadable(self, error: Exception) -> UserError:
        line = (str(error).strip().splitlines() or [""])[0]
        return UserError(
            f"data {self.name!r} can't be read: {type(error).__name__}: {brief(line)}", exit_code=1
        )


class StreamedTexts:
    """The concatenated documents of a stream, split into samples of seq_length + 1 tokens.

    Consecutive samples overlap by one token. After the last document the stream starts again.
    Request samples in ascending order: a sample before those in memory makes the stream restart.
    Every process reads the complete stream and returns the same samples.

    Args:
        name: the source.
        tokenizer: tokenizer of the documents.
        shares: weights of the parts into which documents are split (see `shares_of`).
        part: index of this part.
        seq_length: number of input tokens per sample.
        seed: seed that shuffles samples within blocks of about a million tokens. None: keep the
            order.
        eod: token that ends a document, if tokens must not attend to other documents.
        position: position at which a resumed run starts.
        vocab_size: number of rows of the model. Tokens outside it raise UserError.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        shares: Sequence[float],
        part: int,
        seq_length: int,
        *,
        seed: int | None = None,
        eod: int | None = None,
        position: Position | None = None,
        vocab_size: int | None = None,
    ):
        self.name, self.tokenizer, self.seq_length = name, tokenizer, seq_length
        self.vocabulary = Vocabulary(vocab_size, tokenizer)
        self.shares, self.part, self.seed, self.eod = shares_of(shares), part, seed, eod
        largest = max(1, BLOCK_TOKENS // seq_length)
        self.block = largest if seed is not None else min(READ_TOGETHER, largest)  # samples
        self.start = self.begun = position or Position()  # start of the run, and of the reader
        self.positions: deque[Position] = deque(maxlen=KEPT_POSITIONS)
        self.stream = TextStream(name)
        self._blocks: dict[int, np.ndarray] = {}  # by number of the first sample
        self._most_blocks = KEPT_BLOCKS * largest // self.block
        self._reader: Iterator[tuple[Position, np.ndarray]] | None = None
        self._dealt: tuple[int, np.ndarray] = -1, np.empty(0)
        self._lock = Lock()

    def __len__(self) -> int:
        return 1 << 48  # more than any run needs

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        """Return several samples in one call, for DataLoader."""
        with self._lock:
            rows = {index: self._row(index) for index in sorted(indices)}
        return [sample_of(rows[index].astype(np.int64), self.eod) for index in indices]

    def tokens_of(self, index: int) -> int:
        """Return the number of a sample's tokens."""
        return self.seq_length

    def position_before(self, sample: int) -> dict[str, Any]:
        """Return the last position from which `sample` and later samples can be read again.

        The result is a `Position` as a dictionary for JSON.
        """
        before = [position for position in list(self.positions) if position.sample <= sample]
        return asdict(before[-1] if before else self.start)

    def _row(self, index: int) -> np.ndarray:
        """Return the tokens of a sample."""
        while True:
            place = (index - self.begun.sample) % self.block
            rows = self._blocks.get(index - place)
            if rows is not None:
                return rows[place]
            if self._reader is None or index < min(self._blocks, default=0):
                self.begun = self.start if index >= self.start.sample else Position()
                self._blocks.clear()
                self.positions.clear()
                self._reader = self._read_blocks(self.begun)
            position, rows = next(self._reader)
            self.positions.append(position)
            self._blocks[position.sample] = rows
            if len(self._blocks) > self._most_blocks:
                del self._blocks[min(self._blocks)]

    def _read_blocks(self, start: Position) -> Iterator[tuple[Position, np.ndarray]]:
        """Yield blocks of samples from a position, as tokens [samples, seq_length + 1]."""
        length = self.seq_length
        documents = self._read_documents(start)
        waiting: deque[tuple[Position, np.ndarray]] = deque()  # unused tokens
        for sample in count(start.sample, self.block):
            held = sum(len(tokens) for _, tokens in waiting)
            while held <= self.block * length:
                waiting.append(next(documents))
                held += len(waiting[-1][1])
            tokens = np.concatenate([tokens for _, tokens in waiting])
            rows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
            order = np.arange(self.block)
            if self.seed is not None:
                order = shuffled(order, self.block, derive_seed(self.seed, "stream", sample))
            yield replace(waiting[0][0], sample=sample), rows[order]
            used = self.block * length
            while used:
                position, tokens = waiting.popleft()
                if used < len(tokens):
                    rest = replace(position, tokens=position.tokens + used)
                    waiting.appendleft((rest, tokens[used:]))
                used -= min(used, len(tokens))

    def _read_documents(self, start: Position) -> Iterator[tuple[Position, np.ndarray]]:
        """Yield the position and tokens of each document of this part, in an endless loop."""
        dtype = np.min_scalar_type(self.tokenizer.vocab_size - 1)
        end = np.array([self.tokenizer.eod], dtype)
        skip, skipped, found = start.tokens, False, start.document > 0
        for epoch in count(start.epoch):
            begin = start if epoch == start.epoch else Position(epoch=epoch)
            for position, text in self.stream.read(begin):
                if self._part_of(position.document) != self.part:
                    continue
                if text is None:
                    if not skipped:
                        note_rank_0(
                            f"warning: {self.name}: document {position.document + 1} has no text; "
                            "such documents are skipped"
                        )
                    skipped = True
                    continue
                found = True
                # Names of special tokens in a document are encoded as ordinary text.
                ids = self.tokenizer.encode_to_numpy(text, parse_special=False)
                tokens = np.concatenate([ids.astype(dtype, copy=False), end])
                self._check(tokens, position.document)
                yield replace(position, tokens=skip), tokens[skip:]
                skip = 0
            if not found:
                raise UserError(f"data {self.name!r} has no documents for this part of --split")
            found = False

    def _check(self, tokens: np.ndarray, document: int) -> None:
        """Raise UserError for a token of a document that the model has no row for."""
        size = self.vocabulary.size
        if size is not None and size < self.tokenizer.vocab_size:
            place = f"in document {document + 1:,}"
            self.vocabulary.check(tokens.astype(np.int64), self.name, lambda _: place)

    def _part_of(self, document: int) -> int:
        """Return the part to which a document is assigned."""
        group, place = divmod(document, DEALT)
        if self._dealt[0] != group:
            self._dealt = group, interleaved(self.shares, group * DEALT, DEALT)[0]
        return int(self._dealt[1][place])
