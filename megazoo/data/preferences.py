"""Pairs of answers to the same prompt, of which one was chosen and one rejected."""

from typing import NamedTuple

import numpy as np

from megazoo.data.samples import Conversations, Sample, best_fit, joined


class Pair(NamedTuple):
    """A sample of preferences: two rows, each with the prompt."""

    chosen: Sample
    rejected: Sample


class Preferences:
    """Pairs of conversations. A pair of which one answer is truncated completely is dropped.

    Args:
        chosen, rejected: the conversations with the chosen and with the rejected answers, of the
            same range of rows, without packing.

    Attributes:
        cut: number of truncated conversations, including those of dropped pairs.
        needed, complete: see `Conversations`.
        rows: number of the row of each pair in the file.
        reference: log-probabilities of the answers of each pair under a reference, fp32 [pairs, 2];
            None if batches need none.
    """

    reference: np.ndarray | None = None

    def __init__(self, chosen: Conversations, rejected: Conversations):
        self.chosen, self.rejected = chosen, rejected
        _, first, second = np.intersect1d(
            chosen.numbers, rejected.numbers, assume_unique=True, return_indices=True
        )
        self.places, self.rows = np.stack([first, second], axis=1), chosen.numbers[first]
        self.cut = chosen.cut + rejected.cut
        self.needed = sorted(chosen.needed + rejected.needed)
        self.complete = sorted(chosen.complete + rejected.complete)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Pair:
        first, second = self.places[index]
        pair = self.chosen[first], self.rejected[second]
        if self.reference is None:
            return Pair(*pair)
        known = ({"reference": each} for each in self.reference[index].reshape(2, 1))
        return Pair(*(each._replace(named=own) for each, own in zip(pair, known, strict=True)))

    def pairs_in(self, index: int) -> np.ndarray:
        """Return the numbers of the pairs of a sample."""
        return np.array([index])

    def tokens_of(self, index: int) -> int:
        """Return the number of tokens of both rows, without padding."""
        first, second = self.places[index]
        return self.chosen.tokens_of(first) + self.rejected.tokens_of(second)


class PackedPreferences:
    """Samples of several pairs each. A sample is one row, whose documents are the chosen and the
    rejected answer of each pair. A pair that is longer than a row is dropped.

    Args:
        pairs: the pairs.
        seq_length: number of tokens of a row.

    Attributes:
        numbers: the pairs that are not dropped.
        long: the numbers of tokens of the dropped pairs, ascending.
    """

    def __init__(self, pairs: Preferences, seq_length: int):
        self.pairs = pairs
        first, second = pairs.places.T
        lengths = pairs.chosen.lengths[first] + pairs.rejected.lengths[second]
        fits = lengths <= seq_length
        self.numbers, self.long = np.flatnonzero(fits), sorted(lengths[~fits].tolist())
        self.bins = best_fit(lengths[fits], seq_length)

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> Sample:
        return joined(rows_of([self.pairs[number] for number in self.pairs_in(index)]))

    def pairs_in(self, index: int) -> np.ndarray:
        """Return the numbers of the pairs of a sample."""
        return self.numbers[self.bins[index]]

    def tokens_of(self, index: int) -> int:
        """Return the number of tokens of all pairs of a row, without padding."""
        return sum(map(self.pairs.tokens_of, self.pairs_in(index).tolist()))


def rows_of(samples: list) -> list:
    """Return the rows of samples: both of a pair, in order."""
    return [row for sample in samples for row in (sample if isinstance(sample, Pair) else [sample])]
