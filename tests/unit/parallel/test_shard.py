"""Parameters that several axes cut, and of more than two dimensions."""

import pytest
import torch

from megazoo.errors import UserError
from megazoo.parallel import ParallelContext, ParameterSpec, Shard
from megazoo.parallel.module import ShardedModule, initialize
from megazoo.parallel.shard import in_parts, volume

SHAPE = (5, 300, 140)
CUT = ParameterSpec(SHAPE, (Shard(0, (5,), axis="toy"), Shard(1, (200, 100))), std=0.02)


def everywhere(toy: int, tp: int) -> list[dict[str, tuple[int, int]]]:
    return [{"toy": (toy, e), "tp": (tp, t)} for e in range(toy) for t in range(tp)]


def test_pieces_over_two_axes_cover_each_element_once():
    for toy, tp in ((1, 1), (2, 1), (2, 2), (5, 3)):
        held = torch.zeros(SHAPE, dtype=torch.int)
        for place in everywhere(toy, tp):
            local = torch.zeros(CUT.local_shape(place), dtype=torch.int)
            for piece in CUT.pieces(place):
                local[piece.index()] += 1
                held[tuple(slice(*bounds) for bounds in piece.box)] += piece.owned
            assert (local == 1).all()
        assert (held == 1).all(), (toy, tp)


def test_what_tp_does_not_cut_counts_on_the_first_tp_rank_of_each_place_along_another_axis():
    spec = ParameterSpec(SHAPE, Shard(0, (5,), axis="toy"))
    owned = [spec.pieces(place)[0].owned for place in everywhere(2, 2)]
    assert owned == [True, False, True, False]
    assert spec.shard is None
    assert spec.shard_over("toy").dim == 0


@pytest.mark.parametrize("tp", [2, 3])
def test_initial_values_of_three_dimensions_are_the_same_in_every_layout(tp):
    whole, world = torch.zeros(SHAPE), ParallelContext()
    initialize(whole, CUT, world, 3)
    assert (whole.std(dim=(1, 2)) / 0.02 - 1).abs().max() < 0.02
    assert not torch.equal(whole[0], whole[1])
    for rank in range(tp):
        ctx = ParallelContext.virtual(tp=tp, rank=rank)
        ours = torch.zeros(CUT.local_shape(ctx.place))
        initialize(ours, CUT, ctx, 3)
        for piece in CUT.pieces(ctx.place):
            box = tuple(slice(*bounds) for bounds in piece.box)
            assert torch.equal(ours[piece.index()], whole[box])


def test_a_box_of_three_dimensions_is_cut_into_small_ones():
    held = torch.zeros(4, 7, 9, dtype=torch.int)
    parts = in_parts(((1, 4), (0, 7), (2, 9)), 20)
    for part in parts:
        assert volume(part) <= 20
        held[tuple(slice(*bounds) for bounds in part)] += 1
    assert (held[1:, :, 2:] == 1).all()
    assert held.sum() == 3 * 7 * 7


def test_a_folded_axis_cuts_evenly_and_alone():
    module = ShardedModule(ParallelContext.virtual(dp=4, folded={"toy": 2, "other": 4}))
    with pytest.raises(UserError, match=r"weight has 5 .* can't be split evenly over toy 2"):
        module.add_parameter("weight", CUT)
    shards = (Shard(0, (4,), axis="toy"), Shard(1, (8,), axis="other"))
    with pytest.raises(UserError, match="weight is sharded over toy and other"):
        module.add_parameter("weight", ParameterSpec((4, 8), shards))
    for axis in ("dp", "token_axis"):
        spec = ParameterSpec((4, 8), Shard(0, (4,), axis=axis))
        with pytest.raises(UserError, match=f"weight is sharded over {axis}: "):
            module.add_parameter("weight", spec)
    ShardedModule(ParallelContext.virtual(dp=2)).add_parameter("weight", CUT)


def test_an_axis_or_a_dimension_is_cut_once():
    for shards in (
        (Shard(0, (5,)), Shard(1, (300,))),
        (Shard(0, (5,)), Shard(0, (5,), axis="toy")),
    ):
        with pytest.raises(UserError, match="sharded twice"):
            ParameterSpec(SHAPE, shards)
