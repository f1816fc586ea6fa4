"""The order of samples. The next sample depends only on the seed and the number of earlier samples.

No table of indices is built, so the time to open a corpus does not depend on its size. The order
does not depend on the version of numpy.
"""

import math
from collections.abc import Sequence

import numpy as np

from megazoo.errors import UserError
from megazoo.parallel.random import derive_seed

ROUNDS = 12  # of the Feistel network; 8 rounds do not permute five items uniformly enough
BLOCK = 256  # samples whose places are computed together
SHARES = 1 << 20  # weights of a blend are rounded to multiples of 1 / SHARES


def shuffled(positions: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the elements at `positions` of a random permutation of range(count).

    The permutation is a Feistel network over a grid slightly larger than count. Results outside of
    count are passed through the network again (cycle-walking: Black and Rogaway, 2002).

    Args:
        positions: indices into the permutation, of any shape.
        count: number of elements.
        seed: seed of the permutation.

    Returns:
        int64, with the shape of positions.
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
    """Hash each value to 63 bits with the finalizer of splitmix64."""
    z = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def interleaved(shares: np.ndarray, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each of `count` samples from `first`, and its number in that source.

    The k-th sample of the i-th of n sources has the time (k + (i + 1/2) / n) / share, and samples
    are ordered by time. So after any number of samples, each source has contributed its share, to
    within one or two samples.

    Args:
        shares: int64 [sources], above 0, with the sum SHARES.
        first: number of the first sample.
        count: number of samples.

    Returns:
        Sources and numbers, both int64 [count].
    """
    # The order repeats after SHARES samples. Reducing `first` prevents overflow of int64.
    periods, first = divmod(first, SHARES)
    sources = len(shares)
    phases = (2 * np.arange(sources) + 1) * SHARES

    def before(time: int) -> np.ndarray:
        """Return the number of samples of each source before a time. The sum differs from the time
        by at most n / 2."""
        return np.maximum(-((phases - 2 * sources * shares * time) // (2 * sources * SHARES)), 0)

    margin = sources // 2 + 1
    start = before(max(0, first - margin))
    stop = before(first + count + margin)
    source = np.repeat(np.arange(sources), stop - start)
    number = np.concatenate([np.arange(*ends) for ends in zip(start, stop, strict=True)])
    # Times as integers and fractions are exact, so the order does not depend on `first`.
    unit = 2 * sources * shares[source]
    whole, rest = np.divmod(2 * sources * SHARES * number + phases[source], unit)
    order = np.lexsort((source, rest / unit, whole))[first - start.sum() :][:count]
    return source[order], number[order] + periods * shares[source[order]]


def shares_of(weights: Sequence[float]) -> np.ndarray:
    """Convert weights to integers, int64, with the sum SHARES.

    Raises:
        UserError: a weight is not above 0, or is less than about a millionth of the sum.
    """
    exact = np.asarray(weights, np.float64)
    if not (np.isfinite(exact) & (exact > 0)).all():
        told = ", ".join(f"{weight:g}" for weight in weights)
        raise UserError(f"the weights of a blend must be above 0: {told}")
    ends = np.round(exact.cumsum() / exact.sum() * SHARES).astype(np.int64)
    shares = np.diff(ends, prepend=0)
    if (shares < 1).any():
        raise UserError(
            f"the weight {exact[shares.argmin()]:g} is less than a millionth of the sum of "
            "the weights: use a larger weight, or remove its source"
        )
    return shares


class Blend:
    """The samples of weighted datasets, in the order of a run.

    Each dataset has separate epochs: each of its samples occurs once per epoch. The length of the
    blend, its epoch, is the total number of samples in its datasets.

    Args:
        datasets: the datasets.
        weights: weight of each dataset, above 0.
        seed: seed with which each epoch is shuffled differently. None: keep the datasets' order.
    """

    def __init__(
        self, datasets: Sequence, weights: Sequence[float] = (1.0,), seed: int | None = None
    ):
        self.datasets, self.seed, self.shares = list(datasets), seed, shares_of(weights)
        self._kept: tuple[int, list] = -1, []  # number of a block, and the places of its samples

    def __len__(self) -> int:
        return sum(map(len, self.datasets))

    @property
    def streamed(self) -> bool:
        """Whether a dataset is streamed. If so, request samples in ascending order."""
        return any(map(_is_streamed, self.datasets))

    def positions(self, consumed: int) -> list[dict | None]:
        """Return the position of each streamed dataset after `consumed` samples of the blend.

        None for datasets that are not streamed.
        """
        window = 2 * (SHARES // int(self.shares.min()) + len(self.shares))  # has all datasets
        sources, numbers = interleaved(self.shares, consumed, window)
        return [
            dataset.position_before(int(numbers[sources == source][0]))
            if _is_streamed(dataset)
            else None
            for source, dataset in enumerate(self.datasets)
        ]

    def places(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return the dataset, and the index in it, of each of `count` samples from `first`."""
        number, places = first // BLOCK, []
        start = number * BLOCK
        while len(places) < first - start + count:
            places = places + self._block(number)
            number += 1
        return places[first - start : first - start + count]

    def _block(self, number: int) -> list[tuple[int, int]]:
        """Return the places of a block of samples.

        The last block is cached: numpy needs hardly more time for a block than for one sample.
        """
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
        """Return `count` samples from `first`."""
        places, samples = self.places(first, count), [None] * count
        for source, dataset in enumerate(self.datasets):
            rows = [row for row, place in enumerate(places) if place[0] == source]
            for row, sample in zip(
                rows, _several(dataset, [places[row][1] for row in rows]), strict=True
            ):
                samples[row] = sample
        return samples

    def tokens(self, first: int, count: int) -> int:
        """Return the number of tokens in `count` samples from `first`, without padding."""
        return sum(
            self.datasets[source].tokens_of(index) for source, index in self.places(first, count)
        )


def _is_streamed(dataset) -> bool:
    """Return whether a dataset is streamed, in a fixed order: see `StreamedTexts`."""
    return hasattr(dataset, "position_before")


def _several(dataset, indices: list[int]) -> list:
    """Return samples of a dataset, in one call if it supports that."""
    if not indices:
        return []
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]
