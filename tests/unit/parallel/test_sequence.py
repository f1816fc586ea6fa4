"""How a sequence is cut over context-parallel ranks: each token once, and the work alike."""

from itertools import product

import pytest
import torch

from megazoo.errors import UserError
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.sequence import SequenceCut, in_order, in_parts, padded_length
from megazoo.parallel.shares import share_of

SIZES = [2, 3, 8]


def cuts(size: int, chunk: int = 3, method: str = "allgather") -> list[SequenceCut]:
    return [SequenceCut(2 * size * chunk, size, rank, method) for rank in range(size)]


def test_two_ranks_have_the_outer_and_the_inner_chunks():
    """As written in Llama 3's report: of 2 cp chunks, rank r has r and 2 cp - 1 - r."""
    ids = torch.arange(8)[None]
    assert [cut.own(ids)[0].tolist() for cut in cuts(2, 2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize("size", SIZES)
def test_each_token_is_on_one_rank_and_each_rank_looks_at_as_many_pairs(size):
    here = [cut.positions(torch.device("cpu")).tolist() for cut in cuts(size)]
    assert sorted(place for places in here for place in places) == list(range(6 * size))
    pairs = {sum(position + 1 for position in positions) for positions in here}
    assert len(pairs) == 1
    for cut, positions in zip(cuts(size), here, strict=True):
        assert cut.own(torch.arange(6 * size)[None])[0].tolist() == positions


@pytest.mark.parametrize("size", SIZES)
def test_place_and_local_are_the_reverse_of_own(size):
    whole = torch.randint(0, 99, (2, 6 * size), generator=torch.Generator().manual_seed(size))
    together, everywhere = torch.full_like(whole, -1), torch.arange(6 * size)
    found = torch.zeros_like(everywhere)
    for cut in cuts(size):
        own = cut.own(whole)
        assert cut.place(own, together) is together
        local = cut.local(everywhere)
        here = local >= 0
        assert torch.equal(own[:, local[here]], whole[:, here])
        found += here
    assert torch.equal(together, whole)
    assert found.tolist() == [1] * (6 * size)


@pytest.mark.parametrize("size", SIZES)
def test_parts_in_order_are_the_sequence(size):
    whole = torch.randn(2, 3, 6 * size, 5, generator=torch.Generator().manual_seed(size))
    parts = in_parts(whole, size)
    assert parts.shape == (size, 2, 3, 6, 5)
    for cut, part in zip(cuts(size), parts, strict=True):
        expected = cut.own(whole.permute(0, 2, 1, 3)).permute(0, 2, 1, 3)
        assert torch.equal(part, expected)
    assert torch.equal(in_order(parts), whole)


def test_queries_and_heads_are_those_of_the_method():
    for rank, cut in enumerate(cuts(4)):
        assert cut.queries == cut.chunks
        assert cut.heads(range(5, 10)) == range(5, 10)
        assert cut.chunks[1].stop == 24 - cut.chunks[0].start
        assert cut.chunks[0] == range(3 * rank, 3 * rank + 3)
    exchanged = cuts(2, method="ulysses")
    assert [cut.queries for cut in exchanged] == [(range(12),)] * 2
    # of the five heads from 5 on the first rank has three
    assert [cut.heads(range(5, 10)) for cut in exchanged] == [range(5, 8), range(8, 10)]


def test_shares_are_nearly_equal_and_the_first_are_the_larger():
    for items, parts in product([0, 1, 5, 12], [1, 2, 3, 7]):
        shares = [share_of(range(3, 3 + items), parts, index) for index in range(parts)]
        assert [item for share in shares for item in share] == list(range(3, 3 + items))
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1, (items, parts)
        assert sizes[0] == max(sizes), (items, parts)


def test_the_padded_length_is_the_least_that_all_ranks_can_share():
    for cp, tp, sp, length, padded in (
        (1, 1, False, 13, 13),
        (1, 2, True, 13, 14),
        (1, 2, False, 13, 13),
        (2, 1, False, 13, 16),
        (2, 1, False, 16, 16),
        (2, 2, False, 13, 16),
        (2, 3, False, 13, 16),
        (3, 1, False, 13, 18),
        (2, 2, True, 17, 20),  # two chunks are shared by two tp ranks as they are
        (2, 3, True, 13, 24),  # three tp ranks share a part of twelve
        (2, 4, True, 9, 16),
        (4, 1, False, 1, 8),
    ):
        ctx = ParallelContext.virtual(tp, cp=cp, sequence_parallel=sp)
        assert padded_length(length, ctx) == padded, (cp, tp, sp, length)


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(
        UserError, match="of 6 tokens can't be split over cp 2: pad it to a multiple"
    ):
        SequenceCut.of(6, ParallelContext.virtual(cp=2))


def test_one_rank_cuts_nothing():
    assert SequenceCut.of(12, ParallelContext.virtual(tp=2)) is None
    cut = SequenceCut.of(12, ParallelContext.virtual(cp=2, rank=1, cp_method="ulysses"))
    assert cut == SequenceCut(12, 2, 1, "ulysses")
