"""Batches: made ahead or when needed, padded, cut for the ranks along cp, and moved to a device."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megazoo.constants import IGNORE_INDEX
from megazoo.data import Batches, Blend, PackedDataset
from megazoo.data.samples import Sample
from megazoo.errors import UserError
from megazoo.parallel import ParallelContext

EOD = 99


class Rows:
    """A dataset of rows of the given lengths."""

    def __init__(self, *lengths: int):
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        tokens = np.arange(self.lengths[index] + 1) + 100 * index
        return Sample(tokens[:-1], tokens[1:])


def batches(dataset, rows: int, **layout) -> Batches:
    return Batches(Blend([dataset]), rows, ParallelContext.virtual(**layout))


def test_stages_without_data_get_no_arguments():
    assert Batches(None, 8, ParallelContext())(0) == {}


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_made_ahead_are_those_made_when_needed(workers):
    dataset = PackedDataset(np.arange(2001, dtype=np.uint16), 8)
    made = Batches(Blend([dataset], seed=1), 8, ParallelContext())
    starts = range(16, 400, 8)
    for start, batch in zip(starts, made.ahead(starts, workers), strict=True):
        assert all(torch.equal(batch[name], tensor) for name, tensor in made(start).items())
        assert made.tokens(start) == 64


@pytest.mark.parametrize("workers", [0, 2])
def test_what_fails_ahead_is_raised_in_its_turn(workers):
    tokens = np.arange(2001, dtype=np.uint16)
    dataset = PackedDataset(tokens, 8, vocab_size=1000, name="a.bin", first=5)
    made = batches(dataset, 8).ahead(range(0, 400, 8), workers)
    for _ in range(15):
        next(made)
    told = r"a\.bin: token 1000 at position 1,005 is outside the vocabulary of 1000"
    with pytest.raises(UserError, match=told):
        next(made)


def test_batches_number_the_documents_if_they_are_to_be_separate():
    tokens = np.array([1, 2, EOD, 3, 4, 5, EOD, EOD, 6, 7, 8, 9, 1], np.uint16)
    batch = batches(PackedDataset(tokens, 6, EOD), 2)(0)
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 2, 2, 2, 2]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 2, 3]]
    assert batch["targets"].tolist() == [[2, EOD, 3, 4, 5, EOD], [EOD, 6, 7, 8, 9, 1]]
    assert "document_ids" not in batches(PackedDataset(tokens, 6), 2)(0)


@pytest.mark.parametrize("layout", [{}, {"cp": 2}])
def test_padding_of_uneven_rows_is_marked_if_asked(layout):
    blend, ctx = Blend([Rows(3, 1, 4, 4)]), ParallelContext.virtual(**layout)
    expected = [[0, 0, 0, -1], [0, -1, -1, -1], [0] * 4, [0] * 4]
    batch = Batches(blend, 4, ctx, mark_padding=True)(0)
    assert batch["document_ids"].tolist() == expected
    assert "position_ids" not in batch
    assert "document_ids" not in Batches(blend, 4, ctx)(0)


# Context parallelism: each rank gets its own chunks of the sequences.


def test_a_rank_gets_an_early_chunk_and_a_late_one():
    """Ten tokens are padded to twelve, four chunks of three: rank 0 has the first and the last."""
    tokens = np.arange(11, dtype=np.uint16)
    first, second = (batches(PackedDataset(tokens, 10), 1, cp=2, rank=rank)(0) for rank in range(2))
    assert first["input_ids"].tolist() == [[0, 1, 2, 9, 0, 0]]
    assert first["targets"].tolist() == [[1, 2, 3, 10, -100, -100]]
    assert second["input_ids"].tolist() == [[3, 4, 5, 6, 7, 8]]
    assert second["targets"].tolist() == [[4, 5, 6, 7, 8, 9]]
    assert first["sequence_length"] == second["sequence_length"] == 10


# rows, the layout, and the length that the longest is padded to: a multiple of 2 cp; under sequence
# parallelism tp divides each rank's part, too
CUTS = {
    "it divides": ((16, 16), dict(cp=4), 16),
    "odd": ((13, 7), dict(cp=2), 16),
    "shorter than the chunks": ((3,), dict(cp=4), 8),
    "a row that ends in the first chunk": ((24, 2), dict(cp=3), 24),
    "tp without sequence parallelism": ((13,), dict(cp=2, tp=3), 16),
    "tp with sequence parallelism": ((13,), dict(cp=2, tp=3, sequence_parallel=True), 24),
}


def test_the_chunks_of_all_ranks_are_the_whole_rows():
    for name, (lengths, layout, padded) in CUTS.items():
        cp, tp, dataset = layout["cp"], layout.get("tp", 1), Rows(*lengths)
        whole = batches(dataset, len(lengths))(0)
        ranks = [batches(dataset, len(lengths), rank=tp * rank, **layout)(0) for rank in range(cp)]
        for key, padding in (("input_ids", 0), ("targets", -100)):
            halves = [batch[key].chunk(2, dim=1) for batch in ranks]
            early, late = [half[0] for half in halves], [half[1] for half in halves[::-1]]
            together = torch.cat([*early, *late], dim=1)
            length = whole[key].shape[1]
            assert together.shape[1] == padded, name
            assert together[:, :length].equal(whole[key]), name
            assert bool((together[:, length:] == padding).all()), name
        assert {batch["sequence_length"] for batch in ranks} == {max(lengths)}, name


def test_every_rank_knows_all_documents_and_positions_of_a_row():
    tokens = np.array([1, 2, EOD, 3, 4, 5, EOD, EOD, 6, 7, 8, 9, 1], np.uint16)
    dataset = PackedDataset(tokens, 6, EOD)
    for rank in range(2):
        batch = batches(dataset, 2, cp=2, rank=rank)(0)
        assert batch["input_ids"].shape == (2, 4)
        assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 2, 2, 2, 2]]
        assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 2, 3]]


def test_ranks_along_cp_share_the_rows_of_their_replica():
    dataset = Rows(8, 8, 8, 8)
    for rank, rows in enumerate([[0, 100], [0, 100], [200, 300], [200, 300]]):
        batch = batches(dataset, 4, dp=2, cp=2, rank=rank)(0)
        first = 0 if rank % 2 == 0 else 2
        assert batch["input_ids"][:, 0].tolist() == [row + first for row in rows]


def test_tensors_are_pinned_and_moved_and_what_is_looked_at_stays(monkeypatch):
    """What happens on CUDA, on doubles of its calls."""
    moved, pinned = [], []

    def move(tensor, device, non_blocking):
        assert any(tensor is one for one in pinned)
        moved.append((tensor, device, non_blocking))
        return tensor

    def pin(tensor):
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", move)
    tokens, device = np.array([1, EOD, 2, 3, EOD, 4, 5], np.uint16), torch.device("cuda")
    ctx = replace(ParallelContext.virtual(cp=2), device=device)
    (batch,) = Batches(Blend([PackedDataset(tokens, 6, EOD)]), 1, ctx).ahead([0], workers=1)
    assert batch["sequence_length"] == 6
    assert len(pinned) == 4
    for name in ("input_ids", "targets", "position_ids"):
        assert any(batch[name] is tensor for tensor, *_ in moved)
    assert len(moved) == 3
    assert {(where, at_once) for _, where, at_once in moved} == {(device, True)}
    assert any(batch["document_ids"] is tensor for tensor in pinned)


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "rank": 0}, {"dp": 2, "rank": 1}])
def test_the_last_batch_ends_with_the_data(layout):
    """Seven rows in batches of four: each row has its targets once, and a row more has none."""
    ctx = ParallelContext.virtual(**layout)
    made = Batches(Blend([Rows(*[3] * 7)]), 4, ctx, end=7)
    assert made.starts(20) == range(0, 7, 4)
    assert made.starts(1) == range(0, 4, 4)
    rows = [row for start in made.starts(20) for row in made(start)["targets"].tolist()]
    real = [row[0] // 100 for row in rows if row[0] != IGNORE_INDEX]
    mine = {0: [0, 1, 4, 5], 1: [2, 3, 6]}
    assert real == (mine[layout["rank"]] if layout else list(range(7)))
    assert len(rows) == (4 if layout else 7)
