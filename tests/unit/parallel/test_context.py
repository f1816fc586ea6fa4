"""Where a rank stands: the axes of the mesh, the arithmetic of ranks, sums along several axes."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megazoo.errors import UserError
from megazoo.parallel import ParallelContext
from megazoo.parallel import context as context_module
from megazoo.parallel.collectives import all_reduce_over
from megazoo.parallel.placement import Placement
from tests.support.training import context


def test_ranks_lie_tp_fastest_then_cp_then_dp_then_pp():
    places = [ParallelContext.virtual(2, 3, 4, cp=5, rank=rank) for rank in range(120)]
    assert [(ctx.pp_rank, ctx.dp_rank, ctx.cp_rank, ctx.tp_rank) for ctx in places] == [
        (pp, dp, cp, tp) for pp in range(3) for dp in range(4) for cp in range(5) for tp in range(2)
    ]
    assert {(ctx.tp_size, ctx.pp_size, ctx.dp_size, ctx.cp_size) for ctx in places} == {
        (2, 3, 4, 5)
    }


def test_an_axis_says_what_its_short_names_say():
    ctx = ParallelContext.virtual(2, 3, 4, cp=2, rank=17)
    for name in context_module.AXES:
        axis = ctx.axis(name)
        for what in ("size", "rank", "group"):
            assert getattr(ctx, f"{name}_{what}") is getattr(axis, what)
        assert (axis.group.size(), axis.group.rank()) == (axis.size, axis.rank)
    assert ctx.axes == tuple(ctx.axis(name) for name in context_module.AXES)
    assert ParallelContext().tp.group is None


def test_a_rank_and_its_place_say_the_same():
    ctx = ParallelContext.virtual(2, 3, 4, rank=17)
    assert ctx.place_of(17) == {"pp": 2, "dp": 0, "cp": 0, "tp": 1}
    for rank in range(24):
        assert ctx.rank_at(**ctx.place_of(rank)) == rank
    assert [ctx.rank_at(pp=pp) for pp in range(3)] == [1, 9, 17]  # its own dp and tp
    other = replace(ctx, rank=ctx.rank_at(dp=3, tp=0))
    assert (other.pp_rank, other.dp_rank, other.tp_rank) == (2, 3, 0)


@pytest.mark.parametrize(
    ("name", "pp", "virtual", "expected"),
    [
        ("loop", 1, 1, [[0]]),
        ("loop", 2, 1, [[0], [1]]),
        ("loop", 4, 3, [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]),
        ("v", 2, 2, [[0, 3], [1, 2]]),
        ("v", 4, 2, [[0, 7], [1, 6], [2, 5], [3, 4]]),
    ],
)
def test_each_stage_is_one_ranks(name, pp, virtual, expected):
    placement = Placement(name, pp, virtual)
    assert [list(placement.stages_of(rank)) for rank in range(pp)] == expected
    ranks = {stage: rank for rank, mine in enumerate(expected) for stage in mine}
    assert [placement.rank_of(stage) for stage in range(placement.count)] == [
        ranks[stage] for stage in range(pp * virtual)
    ]
    assert (placement.first_rank, placement.last_rank) == (0, ranks[pp * virtual - 1])


def test_a_placement_that_cannot_be_is_refused():
    with pytest.raises(UserError, match="unknown placement 'w': use loop or v"):
        ParallelContext.virtual(pp=2, placement="w")
    with pytest.raises(
        UserError, match="placement v has two stages per rank, not 3: use virtual-pp"
    ):
        ParallelContext.virtual(pp=2, placement="v", virtual=3)
    assert ParallelContext.virtual(pp=2, placement="v").virtual_size == 2


def totals():
    ctx = context(tp=2, dp=2)
    found = {}
    named = {name: [ctx.axis(name)] for name in ("tp", "dp")}
    for name, axes in {**named, "world": ctx.axes, "none": []}.items():
        total = torch.tensor(float(10**ctx.rank), dtype=torch.float64)
        all_reduce_over(total, axes)
        found[name] = total.item()
    most = torch.tensor(float(ctx.rank))
    all_reduce_over(most, ctx.axes, dist.ReduceOp.MAX)
    return found, most.item()


def test_sums_go_over_the_axes_that_are_named(ranks):
    found, most = zip(*ranks(totals, 4), strict=True)
    assert [each["tp"] for each in found] == [11, 11, 1100, 1100]
    assert [each["dp"] for each in found] == [101, 1010, 101, 1010]
    assert [each["world"] for each in found] == [1111] * 4
    assert [each["none"] for each in found] == [1, 10, 100, 1000]
    assert most == (3.0,) * 4


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 2, "cp": 2}, {"tp": 2, "cp": 4, "pp": 2}])
def test_an_axis_is_folded_into_dp_and_cp(sizes):
    count = math.prod(sizes.values())
    every = [ParallelContext.virtual(**sizes, rank=n, folded={"toy": 2}) for n in range(count)]
    for ctx in every:
        axis, token = ctx.axis("toy"), ctx.token_axis
        assert (axis.size, axis.replicas.size) == (2, 2)
        assert axis.replicas.rank * 2 + axis.rank == token.rank
        assert ctx.place == {"tp": (ctx.tp_size, ctx.tp_rank), "toy": (2, axis.rank)}
        assert ctx.cp_as_dp.place == ctx.place
    assert ParallelContext.virtual(**sizes).place.keys() == {"tp"}


def test_an_axis_that_can_not_be_folded_is_refused():
    for folded, why in (
        ({"toy": 3}, "dp x cp = 4 is not divisible by the folded axis toy 3"),
        ({"tp": 2}, "can't be called 'tp'"),
        ({"Toy_2": 2}, "can't be called 'Toy_2'"),
        ({"toy": 0}, "toy must be a whole number"),
    ):
        with pytest.raises(UserError, match=why):
            ParallelContext.virtual(dp=2, cp=2, folded=folded)


def groups_folded(layout):
    ctx = ParallelContext.from_torch(
        data_parallel_size=layout["dp"],
        context_parallel_size=layout["cp"],
        tensor_parallel_size=layout["tp"],
        folded={"toy": 2},
        device="cpu",
    )
    axis = ctx.axis("toy")
    ranks = dist.get_process_group_ranks
    return ranks(axis.group), ranks(axis.replicas.group)


def test_groups_of_a_folded_axis_are_neighbours_and_their_replicas(ranks):
    found = ranks(groups_folded, 4, {"dp": 2, "cp": 2, "tp": 1})
    assert found == [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
    found = ranks(groups_folded, 4, {"dp": 2, "cp": 1, "tp": 2})
    assert found == [([0, 2], [0]), ([1, 3], [1]), ([0, 2], [2]), ([1, 3], [3])]
