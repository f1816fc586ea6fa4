"""Datasets of token sequences with targets or labels."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megazoo.constants import IGNORE_INDEX
from megazoo.data.indexed import IndexedTokens, Stream
from megazoo.data.labels import Labels, kept_tokens
from megazoo.errors import UserError
from megazoo.files import brief
from megazoo.parallel.random import derive_seed
from megazoo.tokenizer import Tokenizer


class Sample(NamedTuple):
    """A token sequence with its targets.

    Attributes:
        input_ids: int64 [tokens].
        targets: int64 [tokens]. Targets of -100 are excluded from the loss.
        documents: document number of each token, int64 [tokens], if tokens must not attend to other
            documents; otherwise None.
        named: arrays for the loss by name, [tokens, ...] or [documents, ...].
    """

    input_ids: np.ndarray
    targets: np.ndarray
    documents: np.ndarray | None = None
    named: Mapping[str, np.ndarray] = {}


class LabelledRow(NamedTuple):
    """A row of a classifier's data.

    Attributes:
        input_ids: int64 [tokens].
        label: int64 [], or float32 [labels]: see `Labels.typed`.
    """

    input_ids: np.ndarray
    label: np.ndarray


def sample_of(tokens: np.ndarray, eod: int | None = None) -> Sample:
    """Return a sample in which each token predicts the next.

    Args:
        tokens: int64 [tokens + 1].
        eod: token that ends a document, if tokens must not attend to other documents.
    """
    documents = None if eod is None else np.cumsum(np.append(0, tokens[:-2] == eod))
    return Sample(tokens[:-1], tokens[1:], documents)


def joined(samples: list[Sample]) -> Sample:
    """Return one sample with the tokens of several, each a document."""
    documents = np.repeat(np.arange(len(samples)), [len(each.input_ids) for each in samples])
    return Sample(
        np.concatenate([each.input_ids for each in samples]),
        np.concatenate([each.targets for each in samples]),
        documents,
        {name: np.concatenate([each.named[name] for each in samples]) for name in samples[0].named},
    )


class Vocabulary(NamedTuple):
    """The tokens that a model has rows for.

    A tokenizer can have more tokens: those that do not occur in the data need no rows.

    Attributes:
        size: number of rows; None if tokens are not checked.
        tokenizer: tokenizer of the data, whose texts errors print; None if unknown.
    """

    size: int | None = None
    tokenizer: Tokenizer | None = None

    def check(self, ids: np.ndarray, name: str, place: Callable[[tuple[int, ...]], str]) -> None:
        """Raise UserError for the first token outside the vocabulary.

        Args:
            ids: int64, any shape.
            name: file of the tokens.
            place: returns the place of an index of ids in the file, such as "at position 3".
        """
        # As unsigned integers, negative numbers are large.
        if self.size is None or not ids.size or ids.view(np.uint64).max() < self.size:
            return
        index = tuple(np.argwhere((ids < 0) | (ids >= self.size))[0].tolist())
        token, tokenizer, text = int(ids[index]), self.tokenizer, ""
        if tokenizer is not None and 0 <= token < tokenizer.vocab_size:
            text = f"; its text is {brief(tokenizer.decode([token]))}"
        raise UserError(
            f"{name}: token {token} {place(index)} is outside the vocabulary of {self.size}, the "
            f"number of rows of the model{text}",
            exit_code=1,
        )


UNCHECKED = Vocabulary()


@dataclass(frozen=True)
class PackedDataset:
    """Concatenated documents, split into samples of seq_length + 1 tokens. Consecutive samples
    overlap by one token.

    Attributes:
        tokens: the concatenated documents, integers. An incomplete sample at the end is dropped.
        seq_length: number of input tokens per sample.
        eod: token that ends a document, if tokens must not attend to other documents.
        vocab_size: size of the vocabulary. Tokens outside it raise UserError.
        name, first: file of the tokens and place of the first token in it, for the error message.
        tokenizer: tokenizer of the documents, for the error message.
    """

    tokens: np.ndarray | Stream
    seq_length: int
    eod: int | None = None
    vocab_size: int | None = None
    name: str = "the tokens"
    first: int = 0
    tokenizer: Tokenizer | None = None

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_length)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        """Return several samples in one call, for DataLoader."""
        if not 0 <= min(indices) <= max(indices) < len(self):
            raise IndexError(indices)
        starts, length = np.array(indices) * self.seq_length, self.seq_length + 1
        if isinstance(self.tokens, Stream):
            parts = self.tokens.slices(starts, length)
        else:
            parts = [self.tokens[start : start + length] for start in starts.tolist()]
        rows = np.empty((len(parts), length), np.int64)
        for row, part in zip(rows, parts, strict=True):
            row[:] = part
        Vocabulary(self.vocab_size, self.tokenizer).check(
            rows,
            self.name,
            lambda at: f"at position {self.first + int(starts[at[0]]) + at[1]:,}",
        )
        return [sample_of(row, self.eod) for row in rows]

    def tokens_of(self, index: int) -> int:
        """Return the number of a sample's tokens."""
        return self.seq_length


@dataclass(frozen=True)
class MockDataset:
    """Random tokens, with random labels for classifiers. For benchmarks: it needs no files and no
    tokenizer."""

    vocab_size: int
    seq_length: int
    seed: int = 0
    labels: Labels | None = None

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Sample | LabelledRow:
        generator = np.random.default_rng(derive_seed(self.seed, "mock", index))
        tokens = generator.integers(self.vocab_size, size=self.seq_length + 1)
        if self.labels:
            return LabelledRow(tokens[:-1], self.labels.typed(self.labels.drawn(generator)))
        return Sample(tokens[:-1], tokens[1:])

    def tokens_of(self, index: int) -> int:
        """Return the number of a sample's tokens."""
        return self.seq_length


class Conversations:
    """Conversations for fine-tuning. A sample is one conversation, or several packed ones that do
    not attend to each other.

    Args:
        tokens: the ids of each conversation.
        loss_mask: for each id, whether it contributes to the loss.
        first, last: range of conversations to use; last is exclusive.
        seq_length: longer conversations are truncated to this number of tokens. The target of the
            last token is the token that follows in the conversation, never an end. A truncated
            conversation without any token for the loss is dropped.
        packing: pack as many conversations as fit into each sample.
        vocabulary: tokens that the model has rows for.
        name: file of the conversations, for the error message.

    Attributes:
        cut: number of truncated conversations, including dropped ones.
        left_out: number of dropped conversations.
        needed: the numbers of input tokens that dropped conversations need for their first target
            with a loss, ascending.
        complete: the numbers of input tokens of the truncated conversations, ascending.
    """

    def __init__(
        self,
        tokens: IndexedTokens,
        loss_mask: IndexedTokens,
        first: int,
        last: int,
        seq_length: int,
        packing: bool,
        vocabulary: Vocabulary = UNCHECKED,
        name: str = "the conversations",
    ):
        self.tokens, self.loss_mask = tokens, loss_mask
        self.vocabulary, self.name = vocabulary, name
        # The last token is only a target.
        lengths = tokens.lengths[first:last].astype(np.int64) - 1
        cut = np.flatnonzero(lengths > seq_length)
        # By conversation: the number of input tokens up to its first target with a loss.
        places = {n: np.flatnonzero(loss_mask[first + n][1:])[:1] + 1 for n in cut.tolist()}
        empty = [n for n, place in places.items() if not (place <= seq_length).any()]
        self.cut, self.left_out = len(cut), len(empty)
        self.needed = sorted(int(place) for n in empty for place in places[n])
        self.complete = sorted(lengths[cut].tolist())
        self.numbers = np.delete(np.arange(first, last), empty)
        self.lengths = np.delete(np.minimum(lengths, seq_length), empty)
        self.bins = best_fit(self.lengths, seq_length) if packing else None

    def __len__(self) -> int:
        return len(self.lengths if self.bins is None else self.bins)

    def __getitem__(self, index: int) -> Sample:
        if self.bins is None:
            return self._one(index)
        return joined([self._one(number) for number in self.bins[index]])

    def tokens_of(self, index: int) -> int:
        """Return the number of a sample's tokens, without padding."""
        return int(self.lengths[index if self.bins is None else self.bins[index]].sum())

    def _one(self, number: int) -> Sample:
        """Return a conversation."""
        length = self.lengths[number]
        place = self.numbers[number]
        ids = self.tokens[place][: length + 1].astype(np.int64)
        self.vocabulary.check(ids, self.name, lambda _: f"in conversation {place + 1:,}")
        loss_mask = self.loss_mask[place][: length + 1]
        return Sample(ids[:-1], np.where(loss_mask[1:], ids[1:], IGNORE_INDEX))


class LabelledTexts:
    """The rows of a classifier's data: one or two texts and a label.

    Args:
        tokens, pair, label: first texts, second texts and labels, from `cached_tokens`.
        first, last: range of rows to use; last is exclusive.
        seq_length: longer rows are truncated to this number of tokens: see `kept_tokens`.
        labels: format of the labels.
        before: number of ids that the tokenizer puts before a text.
        vocabulary: tokens that the model has rows for.
        name: file of the rows, for the error message.
    """

    def __init__(
        self,
        tokens: IndexedTokens,
        pair: IndexedTokens,
        label: IndexedTokens,
        first: int,
        last: int,
        seq_length: int,
        labels: Labels,
        before: int,
        vocabulary: Vocabulary = UNCHECKED,
        name: str = "the rows",
    ):
        self.vocabulary, self.name = vocabulary, name
        self.tokens, self.pair, self.first, self.labels = tokens, pair, first, labels
        self.numbers = label.tokens.view("<f8").reshape(-1, labels.width)
        one, two = (part.lengths[first:last].astype(np.int64) for part in (tokens, pair))
        self.kept = kept_tokens(one, two, before, seq_length)
        self.lengths = self.kept[0] + self.kept[1]
        self.cut = int((one + two > seq_length).sum())

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> LabelledRow:
        place = self.first + index
        parts = [
            source[place][: kept[index]]
            for source, kept in zip((self.tokens, self.pair), self.kept, strict=True)
        ]
        label = self.labels.typed(self.numbers[place])
        ids = np.concatenate(parts).astype(np.int64)
        self.vocabulary.check(ids, self.name, lambda _: f"in row {place + 1:,}")
        return LabelledRow(ids, label)

    def tokens_of(self, index: int) -> int:
        """Return the number of a row's tokens, without padding."""
        return int(self.lengths[index])


def best_fit(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Pack lengths into bins by best-fit decreasing.

    Lengths are placed in descending order, each into the bin that it leaves with the least room.

    Args:
        lengths: lengths to pack, at most size each.
        size: capacity of a bin.

    Returns:
        For each bin, the indices of its lengths.
    """
    bins: list[list[int]] = []
    rooms: list[int] = []  # distinct free space of the bins, ascending
    with_room: dict[int, list[int]] = defaultdict(list)
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, place = size, len(bins)
            bins.append([])
        else:
            room = rooms[at]
            place = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        bins[place].append(number)
        if left := room - length:
            if not with_room[left]:
                insort(rooms, left)
            with_room[left].append(place)
    return bins
