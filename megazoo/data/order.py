"""The order of samples: which one comes next is a function of the seed and of how many came before,
and of nothing else.

No table is made, so that a corpus of any size opens in the same time, and no version of numpy
changes the order.
"""

import math
from collections.abc import Sequence

import numpy as np

from megazoo.errors import UserError
from megazoo.parallel.random import derive_seed

ROUNDS = 12  # of the network behind a permutation; with 8 those of five things are not quite even
BLOCK = 256  # samples whose places are found together
SHARES = 1 << 20  # a blend's weights are multiples of one in so many


def shuffled(positions: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return what a permutation of `count` things, drawn by the seed, has at `positions`: int64, of
    the shape of these.

    A Feistel network over a grid hardly larger than count; what falls outside of count goes through
    again (cycle-walking: Black and Rogaway, 2002).
    """
    rows = math.isqrt(count - 1) + 1
    columns = -(-count // rows)
    keys = [derive_seed(seed, number) for number in range(ROUNDS)]

    def once(index: np.ndarray) -> np.ndarray:
        row, column = np.divmod(index, columns)
        for row_key, column_key in zip(keys[::2], keys[1::2], strict=True):
            row = (row + _hash(column, row_key) % rows) % rows
            column = (column + _hash(row, column_key) % columns) % columns
        return row * columns + column

    result = once(np.asarray(positions, np.int64).reshape(-1))
    while (outside := result >= count).any():
        result[outside] = once(result[outside])
    return result.reshape(np.shape(positions))


def _hash(values: np.ndarray, key: int) -> np.ndarray:
    """Hash each value to 63 bits, by the finalizer of splitmix64."""
    z = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def interleaved(shares: np.ndarray, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each sample from number `first` on, and how many that source had before
    it: int64 [count] both.

    shares: int64, above 0, adding up to SHARES. The k-th sample of the i-th of n sources stands at
    the time (k + (i + 1/2) / n) / share, so that after any number of samples each source has had
    its share, but for one or two.
    """
    # All goes on as from the start after SHARES samples: so no product is ever too large for int64.
    periods, first = divmod(first, SHARES)
    sources = len(shares)
    phases = (2 * np.arange(sources) + 1) * SHARES

    def before(time: int) -> np.ndarray:
        """Return how many samples of each source stand before a time; their sum differs from it by
        half of n at most."""
        return np.maximum(-((phases - 2 * sources * shares * time) // (2 * sources * SHARES)), 0)

    margin = sources // 2 + 1
    start = before(max(0, first - margin))
    stop = before(first + count + margin)
    source = np.repeat(np.arange(sources), stop - start)
    number = np.concatenate([np.arange(*ends) for ends in zip(start, stop, strict=True)])
    # Times as whole numbers and fractions: exact, and so the same wherever one begins.
    unit = 2 * sources * shares[source]
    whole, rest = np.divmod(2 * sources * SHARES * number + phases[source], unit)
    order = np.lexsort((source, rest / unit, whole))[first - start.sum() :][:count]
    return source[order], number[order] + periods * shares[source[order]]


def shares_of(weights: Sequence[float]) -> np.ndarray:
    """Return the weights as whole numbers, int64, that add up to SHARES; UserError for one that is
    not above 0."""
    exact = np.asarray(weights, np.float64)
    if not (np.isfinite(exact) & (exact > 0)).all():
        told = ", ".join(f"{weight:g}" for weight in weights)
        raise UserError(f"the weights of a blend must be above 0: {told}")
    ends = np.round(exact.cumsum() / exact.sum() * SHARES).astype(np.int64)
    shares = np.diff(ends, prepend=0)
    if (shares < 1).any():
        raise UserError(
            f"the weight {exact[shares.argmin()]:g} is less than a millionth of the blend"
        )
    return shares


class Blend:
    """The samples of datasets, each by its weight, in the order in which a run sees them.

    Each dataset goes through epochs of its own, and sees each of its samples once in each. seed:
    every epoch is shuffled anew; None: in the datasets' order. A blend's own epoch is as many
    samples as its datasets have together.
    """

    def __init__(
        self, datasets: Sequence, weights: Sequence[float] = (1.0,), seed: int | None = None
    ):
        self.datasets, self.seed, self.shares = list(datasets), seed, shares_of(weights)
        self._kept: tuple[int, list] = -1, []  # a block's number, and its places

    def __len__(self) -> int:
        return sum(map(len, self.datasets))

    @property
    def streamed(self) -> bool:
        """Whether a dataset is streamed: then samples are to be asked for in ascending order."""
        return any(map(_is_streamed, self.datasets))

    def positions(self, consumed: int) -> list[dict | None]:
        """Return, for each dataset that is streamed, from where it can be read after so many
        samples of the blend; for others None."""
        window = 2 * (SHARES // int(self.shares.min()) + len(self.shares))  # has a sample of each
        sources, numbers = interleaved(self.shares, consumed, window)
        return [
            dataset.position_before(int(numbers[sources == source][0]))
            if _is_streamed(dataset)
            else None
            for source, dataset in enumerate(self.datasets)
        ]

    def places(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return the dataset and the index in it of each sample from number `first` on."""
        number, places = first // BLOCK, []
        start = number * BLOCK
        while len(places) < first - start + count:
            places = places + self._block(number)
            number += 1
        return places[first - start : first - start + count]

    def _block(self, number: int) -> list[tuple[int, int]]:
        """Return the places of a block of samples. The last block's are kept: numpy takes hardly
        longer for all of them than for one."""
        kept = self._kept
        if kept[0] != number:
            self._kept = kept = number, self._places(number * BLOCK, BLOCK)
        return kept[1]

    def _places(self, first: int, count: int) -> list[tuple[int, int]]:
        sources, numbers = interleaved(self.shares, first, count)
        indices = np.empty_like(numbers)
        for source, dataset in enumerate(self.datasets):
            epochs, positions = np.divmod(numbers, len(dataset))
            mine = sources == source
            if self.seed is not None and not _is_streamed(dataset):
                for epoch in np.unique(epochs[mine]).tolist():
                    chosen = mine & (epochs == epoch)
                    seed = derive_seed(self.seed, "samples", source, epoch)
                    positions[chosen] = shuffled(positions[chosen], len(dataset), seed)
            indices[mine] = positions[mine]
        return list(zip(sources.tolist(), indices.tolist(), strict=True))

    def samples(self, first: int, count: int) -> list:
        """Return so many samples, from number `first` on."""
        places, samples = self.places(first, count), [None] * count
        for source, dataset in enumerate(self.datasets):
            rows = [row for row, place in enumerate(places) if place[0] == source]
            for row, sample in zip(
                rows, _several(dataset, [places[row][1] for row in rows]), strict=True
            ):
                samples[row] = sample
        return samples

    def tokens(self, first: int, count: int) -> int:
        """Return how many tokens those samples hold, without padding."""
        return sum(
            self.datasets[source].tokens_of(index) for source, index in self.places(first, count)
        )


def _is_streamed(dataset) -> bool:
    """Return whether a dataset has an order of its own: see `StreamedTexts`."""
    return hasattr(dataset, "position_before")


def _several(dataset, indices: list[int]) -> list:
    """Return samples of a dataset, at once if it can."""
    if not indices:
        return []
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]
