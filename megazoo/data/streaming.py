"""Text of any size, streamed by the package `datasets` and tokenized while a run trains."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from threading import Lock
from typing import Any

import numpy as np

from megazoo.data.order import interleaved, shares_of, shuffled
from megazoo.data.samples import Sample, sample_of
from megazoo.data.text_files import builder_of_stream, files_of_stream
from megazoo.errors import UserError
from megazoo.files import brief
from megazoo.parallel.random import derive_seed
from megazoo.terminal import note_rank_0
from megazoo.tokenizer import Tokenizer

COLUMN = "text"
BLOCK_TOKENS = 1 << 20  # of the samples that are shuffled together
KEPT_BLOCKS = 8  # that are still in memory
KEPT_POSITIONS = 1024
DEALT = 4096  # documents that are dealt to the parts together


@dataclass(frozen=True)
class Position:
    """Where a block of samples begins in a stream.

    sample: the number of its first sample. epoch, document: the pass over the stream and the number
    there of the document that the block begins in. tokens: of this document, before the block.
    state: of `datasets`, before this document; None: before the first.
    """

    sample: int = 0
    epoch: int = 0
    document: int = 0
    tokens: int = 0
    state: dict[str, Any] | None = None


def check_stream(name: str) -> None:
    """Raise UserError unless the source's files and the package `datasets` are there. No file is
    opened."""
    builder_of_stream(name)
    files_of_stream(name)
    if find_spec("datasets") is None:
        raise UserError(f"data {name!r} is read by the package datasets: pip install datasets")


def open_stream(name: str) -> Any:
    """Return the `datasets.IterableDataset` of a source, with its text alone. UserError for what
    can't be opened, or has no text."""
    load_dataset = import_module("datasets").load_dataset
    try:
        stream = load_dataset(
            builder_of_stream(name), data_files=files_of_stream(name), split="train", streaming=True
        )
        columns = stream.column_names or list(next(iter(stream), {}))
    except UserError:
        raise
    except Exception as error:
        raise _unreadable(name, error) from error
    if COLUMN not in columns:
        found = ", ".join(map(str, columns[:20])) or "none"
        raise UserError(f"data {name!r} has no column {COLUMN!r}; its columns are: {found}")
    return stream.select_columns([COLUMN])


def _unreadable(name: str, error: Exception) -> UserError:
    lines = str(error).strip().splitlines() or [""]
    return UserError(
        f"data {name!r} can't be read: {type(error).__name__}: {brief(lines[0])}", exit_code=1
    )


class StreamedTexts:
    """The documents of a stream end to end, cut into samples of seq_length + 1 tokens that share
    one token with the next; after the last document comes the first again.

    name: the source. shares, part: of how many documents this part is one, and which: documents are
    dealt to the parts in turn. seed: samples are shuffled within blocks of about a million tokens;
    None: they keep their order. eod: as for `PackedDataset`. position: where a resumed run begins.

    Samples are asked for in ascending order; to go back further than KEPT_BLOCKS reads the stream
    from its start. Every process that opens it reads it whole, and all find the same samples.
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
    ):
        self.name, self.tokenizer, self.seq_length = name, tokenizer, seq_length
        self.shares, self.part, self.seed, self.eod = shares_of(shares), part, seed, eod
        self.block = max(1, BLOCK_TOKENS // seq_length)  # samples
        self.first = position or Position()
        self.positions: deque[Position] = deque(maxlen=KEPT_POSITIONS)
        self._blocks: dict[int, np.ndarray] = {}  # by the number of their first sample
        self._reader: Iterator[tuple[Position, np.ndarray]] | None = None
        self._lock = Lock()

    def __len__(self) -> int:
        return 1 << 48  # more than any run takes

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        """Return several samples at once, as torch's loaders ask for them."""
        with self._lock:
            rows = {index: self._row(index) for index in sorted(indices)}
        return [sample_of(rows[index].astype(np.int64), self.eod) for index in indices]

    def tokens_of(self, index: int) -> int:
        """Return the number of a sample's tokens."""
        return self.seq_length

    def position_before(self, sample: int) -> dict[str, Any]:
        """Return the last place from which the samples from `sample` on can be read again, as a
        dictionary for JSON: see `Position`."""
        before = [position for position in list(self.positions) if position.sample <= sample]
        return asdict(before[-1] if before else self.first)

    def _row(self, index: int) -> np.ndarray:
        """Return the tokens of a sample."""
        while True:
            for first, rows in self._blocks.items():
                if first <= index < first + len(rows):
                    return rows[index - first]
            if self._reader is None or index < min(self._blocks, default=0):
                start = self.first if index >= self.first.sample else Position()
                self._blocks.clear()
                self.positions.clear()
                self._reader = self._read_blocks(start)
            position, rows = next(self._reader)
            self.positions.append(position)
            self._blocks[position.sample] = rows
            if len(self._blocks) > KEPT_BLOCKS:
                del self._blocks[min(self._blocks)]

    def _read_blocks(self, start: Position) -> Iterator[tuple[Position, np.ndarray]]:
        """Yield the blocks of samples from a position on, as tokens [samples, seq_length + 1]."""
        length = self.seq_length
        documents = self._read_documents(start)
        waiting: deque[tuple[Position, np.ndarray]] = deque()  # the rest of each, and its place
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
        """Yield the tokens of each document of this part, and its place, without end."""
        dtype = np.min_scalar_type(self.tokenizer.vocab_size - 1)
        end = np.array([self.tokenizer.eod], dtype)
        skip, skipped = start.tokens, False
        for epoch in count(start.epoch):
            position = start if epoch == start.epoch else Position()
            found = epoch == start.epoch and start.document > 0
            for number, state, text in self._read_texts(position):
                if not text:
                    if not skipped:
                        note_rank_0(
                            f"warning: {self.name}: document {number + 1} has no text; "
                            "such documents are skipped"
                        )
                    skipped = True
                    continue
                found = True
                # A special token's name in a document is text.
                ids = self.tokenizer.encode_to_numpy(text, parse_special=False)
                tokens = np.concatenate([ids.astype(dtype, copy=False), end])[skip:]
                yield Position(0, epoch, number, skip, state), tokens
                skip = 0
            if not found:
                raise UserError(f"data {self.name!r} has no documents for this part of --split")

    def _read_texts(self, start: Position) -> Iterator[tuple[int, dict | None, Any]]:
        """Yield the number, the state of `datasets` before it, and the text of this part's
        documents in one pass."""
        stream = open_stream(self.name)
        try:
            if start.state:
                stream.load_state_dict(start.state)
            texts = iter(stream)
            for number in count(start.document):
                # Until something is read, a stream has the state of its beginning.
                state = start.state if number == start.document else stream.state_dict()
                value = next(texts, None)
                if value is None:
                    return
                if self._part_of(number) == self.part:
                    yield number, state, value[COLUMN]
        except Exception as error:
            raise _unreadable(self.name, error) from error

    def _part_of(self, document: int) -> int:
        """Return the part that a document is dealt to."""
        group = document // DEALT
        if getattr(self, "_group", None) != group:
            self._group, self._dealt = group, interleaved(self.shares, group * DEALT, DEALT)[0]
        return int(self._dealt[document % DEALT])
