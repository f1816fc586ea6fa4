"""The order of samples: a permutation an epoch, weights met, and the same sequence in every layout
and after a stop."""

from collections import Counter
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
import torch

from megazoo.data import Batches, Blend, PackedDataset
from megazoo.data.order import SHARES, interleaved, shares_of, shuffled
from megazoo.errors import UserError
from megazoo.parallel import ParallelContext
from tests.support.sampling import marked_slow


def test_shuffled_is_a_permutation_and_each_seed_has_its_own():
    for count in (1, 2, 3, 5, 16, 17, 1000, 1023, 30_011):
        orders = [shuffled(np.arange(count), count, seed) for seed in range(3)]
        for order in orders:
            assert np.array_equal(np.sort(order), np.arange(count)), count
        assert count < 16 or not any(np.array_equal(orders[0], other) for other in orders[1:])
        # an order does not depend on what else is asked for
        places = np.random.default_rng(0).integers(count, size=7)
        assert np.array_equal(shuffled(places, count, 1), orders[1][places]), count


@pytest.mark.parametrize("count", marked_slow([3, 4, 5], lambda _, count: count != 4))
def test_all_permutations_are_as_likely(count):
    seeds, kinds = 6000, list(permutations(range(count)))
    seen = Counter(tuple(shuffled(np.arange(count), count, seed).tolist()) for seed in range(seeds))
    expected = seeds / len(kinds)
    squares = sum((seen[kind] - expected) ** 2 / expected for kind in kinds)
    freedom = len(kinds) - 1
    assert squares < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations of chi square


def test_neighbours_are_not_neighbours_after():
    order = shuffled(np.arange(10_007), 10_007, 3)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert (np.diff(order) == 1).sum() < 10


WEIGHTS = {
    "one": [1],
    "even": [1, 1, 1],
    "two": [0.7, 0.3],
    "three": [0.6, 0.3, 0.1],
    "small": [1, 1e-3, 1e-3],
    "many": np.random.default_rng(0).random(20) ** 3 + 1e-4,
}


def test_weights_are_met_at_every_moment():
    for name, weights in WEIGHTS.items():
        sources, numbers = interleaved(shares_of(weights), 0, 30_000)
        for source, weight in enumerate(np.asarray(weights) / np.sum(weights)):
            seen = np.cumsum(sources == source)
            # in order, none left out
            assert np.array_equal(numbers[sources == source], np.arange(seen[-1])), name
            assert abs(seen - weight * np.arange(1, 30_001)).max() < 2, name
            for first in (0, 5_000, 12_345, 20_000):
                met = (sources[first : first + 10_000] == source).mean()
                assert abs(met - weight) < 1e-3, name


def test_an_interleaving_goes_by_time_and_is_the_same_wherever_one_begins():
    last = 2**53  # as many samples as a checkpoint may have seen: no product overflows
    for name, weights in WEIGHTS.items():
        shares = shares_of(weights)
        whole = interleaved(shares, 0, 3000)
        # against exact times: the k-th of the i-th of n sources is at (k + (i + 1/2) / n) / share
        times = [
            ((k + Fraction(2 * i + 1, 2 * len(shares))) / int(share), i, k)
            for i, share in enumerate(shares)
            for k in range(300)
        ]
        expected = [(i, k) for _, i, k in sorted(times)[:300]]
        assert list(zip(*(array[:300].tolist() for array in whole), strict=True)) == expected, name
        for first, count in [(0, 1), (1, 1), (7, 30), (999, 1), (2500, 500)]:
            for part, all_of_it in zip(interleaved(shares, first, count), whole, strict=True):
                assert np.array_equal(part, all_of_it[first : first + count]), name
        far = interleaved(shares, 10**11, 10)
        assert np.array_equal(interleaved(shares, 10**11 + 4, 6)[1], far[1][4:]), name
        sources, numbers = interleaved(shares, last, 1000)
        whole = [array[:1000] for array in whole]
        assert np.array_equal(sources, whole[0]), name
        assert np.array_equal(numbers, whole[1] + last // SHARES * shares[whole[0]]), name


def test_shares_add_up_and_bad_weights_are_refused():
    assert shares_of([3, 1]).tolist() == [SHARES * 3 // 4, SHARES // 4]
    assert shares_of(WEIGHTS["many"]).sum() == SHARES
    for weights in ([1, 0], [1, -1], [1, float("nan")], [1, float("inf")]):
        with pytest.raises(UserError, match="must be above 0"):
            shares_of(weights)
    with pytest.raises(UserError, match="the weight 1e-09 is less than a millionth of the sum"):
        shares_of([1, 1e-9])


def test_an_epoch_sees_every_sample_and_the_next_is_shuffled_anew():
    blend = Blend([range(50)], seed=1)
    epochs = [[index for _, index in blend.places(50 * epoch, 50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    # across an epoch's end
    assert [index for _, index in blend.places(45, 10)] == epochs[0][45:] + epochs[1][:5]
    assert epochs[0] != [index for _, index in Blend([range(50)], seed=2).places(0, 50)]
    assert [index for _, index in Blend([range(50)]).places(45, 10)] == [*range(45, 50), *range(5)]


def corpus(source: int, documents: int) -> tuple[np.ndarray, list[tuple]]:
    """A stream of documents of uneven length, all of whose tokens differ, and the documents."""
    lengths = np.random.default_rng(source).integers(1, 40, documents)
    tokens = np.arange(lengths.sum()) + 100_000 * source
    return tokens, [tuple(part.tolist()) for part in np.split(tokens, lengths.cumsum()[:-1])]


@pytest.mark.parametrize("dp", [1, 4])
def test_three_epochs_are_the_same_for_every_dp_and_after_a_resume_at_another(dp):
    length, rows = 8, 8
    streams, documents = zip(*(corpus(source, 30) for source in range(2)), strict=True)
    datasets = [PackedDataset(stream, length) for stream in streams]

    def blend():
        return Blend(datasets, [0.7, 0.3], seed=5)

    one = Batches(blend(), rows, ParallelContext())
    replicas = [
        Batches(blend(), rows, ParallelContext.virtual(dp=dp, rank=rank)) for rank in range(dp)
    ]
    later = [Batches(blend(), rows, ParallelContext.virtual(dp=8, rank=rank)) for rank in range(8)]
    total = -(-10 * max(map(len, datasets)) // rows) * rows  # three epochs of each at least
    seen = []
    for consumed in range(0, total, rows):
        # stopped, and gone on with in another layout
        now = replicas if consumed < total // 2 else later
        parts = [batches(consumed) for batches in now]
        batch = {
            name: torch.cat([part[name] for part in parts]) for name in ("input_ids", "targets")
        }
        assert all(torch.equal(batch[name], tensor) for name, tensor in one(consumed).items())
        assert torch.equal(batch["input_ids"][:, 1:], batch["targets"][:, :-1])
        seen += torch.cat([batch["input_ids"], batch["targets"][:, -1:]], 1).tolist()
    for source, (stream, dataset) in enumerate(zip(streams, datasets, strict=True)):
        mine = [sample for sample in seen if sample[0] // 100_000 == source]
        assert len(mine) >= 3 * len(dataset)
        epochs = [mine[epoch * len(dataset) : (epoch + 1) * len(dataset)] for epoch in range(3)]
        for epoch in epochs:
            predicted = sorted(token for sample in epoch for token in sample[1:])
            tail = (len(stream) - 1) % length  # what no sample has
            # each token once, apart from the tail
            assert predicted == stream[1 : len(stream) - tail].tolist()
        assert epochs[0] != epochs[1] != epochs[2]
        assert sum(documents[source], ()) == tuple(stream)


def test_places_are_the_same_however_many_are_asked_for():
    """They are found in blocks, of which the last one is kept."""
    blend = Blend([range(70), range(300)], [1, 3], seed=5)
    expected = blend.places(0, 1200)
    for first, count in ((0, 1), (255, 2), (256, 256), (250, 600), (1, 1199), (700, 1), (10, 3)):
        assert blend.places(first, count) == expected[first : first + count]
    assert len(set(expected)) == 370
