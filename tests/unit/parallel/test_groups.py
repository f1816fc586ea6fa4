"""The process groups of a context: which there are, that they are connected, and how many sockets
they may take."""

import json
import os
import resource

import pytest
import torch
import torch.distributed as dist

from megazoo.parallel import context as context_module
from megazoo.parallel import groups
from megazoo.parallel.context import AXES, DEFAULT_TIMEOUT, ParallelContext
from megazoo.testing import RankPool
from tests.support.sampling import marked_slow
from tests.support.training import context, layout_name, world

LAYOUTS = [dict(pp=2), dict(cp=2), dict(tp=2, pp=2), dict(pp=4), dict(cp=2, dp=2)]
MORE = [dict(tp=2), dict(dp=2), dict(pp=2, dp=2), dict(pp=2, cp=2), dict(cp=2, tp=2)]


def looked_at(layout):
    ctx = context(**layout)
    return memberships(ctx), warmed(ctx), folded(ctx) if ctx.cp_size > 1 else None


@pytest.mark.parametrize(
    "layout", marked_slow(LAYOUTS + MORE, lambda _, layout: layout in MORE), ids=layout_name
)
def test_groups_are_connected_and_of_the_ranks_of_their_axis(ranks, layout):
    for rank, (found, sent, refolded) in enumerate(ranks(looked_at, world(layout), layout)):
        each_axis_is_a_group(layout, rank, *found)
        each_group_is_warmed_up_by_all_its_ranks(layout, rank, sent)
        if refolded:
            cp_is_folded_into_dp_without_new_groups(layout, rank, *refolded)


def memberships(ctx):
    """Of each axis the ranks of this rank's group; and how many groups torch knows of, in all."""
    members = {name: dist.get_process_group_ranks(ctx.axis(name).group) for name in AXES}
    members["dp and cp"] = dist.get_process_group_ranks(ctx.token_axis.group)
    lone = [ctx.axis(name).group for name in AXES if ctx.axis(name).size == 1]
    total = torch.tensor(float(ctx.rank + 1))
    for group in lone:  # as a user's own code may
        dist.all_reduce(total, group=group)
    devices = {device.type for group in lone for device in group._device_types}
    return members, len(set(lone)), total.item(), len(dist.distributed_c10d._world.pg_map), devices


def each_axis_is_a_group(layout, rank, members, lone, total, known, devices):
    sizes = [layout.get(name, 1) for name in AXES]
    place = ParallelContext.virtual(**layout, rank=rank)
    for name, size in zip(AXES, sizes, strict=True):
        assert members[name] == [place.rank_at(**{name: other}) for other in range(size)]
    # One for all such axes, which sums over nobody else; it takes CPU tensors and a GPU's.
    assert (lone, total) == (int(1 in sizes), rank + 1)
    assert devices >= {"cpu", "cuda"} or lone == 0
    dp, cp = (range(layout.get(name, 1)) for name in ("dp", "cp"))
    assert members["dp and cp"] == [place.rank_at(dp=a, cp=b) for a in dp for b in cp]
    # The world, one along each axis that has others, along two together, and the one of this rank
    # alone.
    joint = len(dp) > 1 and len(cp) > 1
    assert known == 1 + sum(size > 1 for size in sizes) + joint + lone


def warmed(ctx):
    """Warm up a context's groups, and return what was sent, in order."""
    sent = []
    names = {id(ctx.axis(name).group): name for name in AXES if ctx.axis(name).size > 1}
    reduce, batch = dist.all_reduce, dist.batch_isend_irecv

    def all_reduce(tensor, group):
        sent.append((names[id(group)], "all", len(sent)))
        return reduce(tensor, group=group)

    def batch_isend_irecv(ops):
        sent.extend((names[id(op.group)], op.op.__name__, op.group_peer) for op in ops)
        return batch(ops)

    dist.all_reduce, dist.batch_isend_irecv = all_reduce, batch_isend_irecv
    try:
        groups.warm_up([ctx.axis(name).group for name in AXES], ctx.pp_group, ctx.device)
    finally:
        dist.all_reduce, dist.batch_isend_irecv = reduce, batch
    return sent


def each_group_is_warmed_up_by_all_its_ranks(layout, rank, sent):
    pp, place = layout.get("pp", 1), ParallelContext.virtual(**layout, rank=rank)
    reduced = [name for name in AXES if layout.get(name, 1) > 1]
    assert sent[: len(reduced)] == [(name, "all", at) for at, name in enumerate(reduced)]
    neighbours = {(place.pp_rank + 1) % pp, (place.pp_rank - 1) % pp} if pp > 1 else set()
    expected = {("pp", op, peer) for op in ("isend", "irecv") for peer in neighbours}
    assert set(sent[len(reduced) :]) == expected


def folded(ctx):
    """Where this rank is with cp folded into dp, and whether torch knows of more groups then."""
    known = dist.distributed_c10d._world.pg_map
    before = len(known)
    there = ctx.cp_as_dp
    assert ctx.cp_as_dp is there
    members = {name: dist.get_process_group_ranks(there.axis(name).group) for name in AXES}
    place = {name: there.axis(name).rank for name in AXES}
    return members, place, there.place_of(there.rank), len(known) - before


def cp_is_folded_into_dp_without_new_groups(layout, rank, members, place, same, new):
    sizes = {**layout, "dp": layout.get("dp", 1) * layout["cp"], "cp": 1}
    expected = ParallelContext.virtual(**sizes, rank=rank)
    assert place == same == {name: expected.axis(name).rank for name in AXES}
    for name in AXES:
        others = range(sizes.get(name, 1))
        assert members[name] == [expected.rank_at(**{name: other}) for other in others]
    assert new == 0


class Reached(Exception):
    pass


def on_cuda(monkeypatch, ranks_of_world: int) -> tuple:
    """What init_process_group is called with on the second GPU of a machine."""
    called = []

    def init_process_group(*arguments, **named):
        called.append((arguments, named))
        raise Reached

    monkeypatch.setattr(context_module, "choose_device", lambda *_: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setenv("WORLD_SIZE", str(ranks_of_world))
    monkeypatch.setenv("RANK", str(ranks_of_world - 1))
    with pytest.raises(Reached):
        ParallelContext.from_torch()
    return called[0]


def test_nccl_is_told_the_device_and_a_world_of_one_has_no_communicator(monkeypatch):
    """Stands in for a GPU: torch takes the argument only where there is one."""
    backends, named = ("cpu:gloo,cuda:nccl",), {"timeout": DEFAULT_TIMEOUT}
    assert on_cuda(monkeypatch, 2) == (backends, {"device_id": torch.device("cuda", 1), **named})
    assert on_cuda(monkeypatch, 1) == (backends, {"device_id": None, **named})


def warmed_on_cuda():
    """A context whose device is a GPU, as far as from_torch sees. NCCL's part of a group is left
    out."""
    called, asked, new_group = [], [], dist.new_group

    def of_gloo(ranks, timeout=None, backend=None, **options):
        asked.append(backend)
        return new_group(ranks, timeout, backend="gloo", **options)

    dist.new_group = of_gloo
    context_module.choose_device = lambda *_: torch.device("cuda", 0)
    torch.cuda.set_device = lambda _: None
    context_module.warm_up = lambda rows, pipeline, device: called.append(
        ([group.size() for group in rows], pipeline.size(), device.type)
    )
    ParallelContext.from_torch(2, 1, 1)
    return called, set(asked)


def test_a_context_on_gpus_warms_its_groups_up():
    pool = RankPool()  # of its own: what is replaced stays so
    try:
        for called, backends in pool.run(warmed_on_cuda, 2):
            assert called == [([1, 1, 1, 2], 1, "cuda")]
            assert backends == {"gloo", "cpu:gloo,cuda:nccl"}  # of one rank, and of both
    finally:
        pool.close()


def limits_after(soft: int, hard: int, ranks_of_world: int) -> tuple[int, int]:
    """The limits on open files of a fresh process that has such ones at first."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            groups.allow_sockets(ranks_of_world)
            found = json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE))
            os.write(write, found.encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as told:
        text = told.read()
    os.waitpid(child, 0)
    return tuple(json.loads(text))


def test_many_ranks_may_open_many_sockets():
    for soft, hard, ranks_of_world, expected in (
        (1024, 8192, 8, 1024),  # enough
        (1024, 8192, 512, 5 * 512 + groups.OTHER_FILES),
        (1024, 2000, 512, 2000),  # as far as the system allows
        (4096, 8192, 512, 4096),  # never lower
    ):
        assert limits_after(soft, hard, ranks_of_world) == (expected, hard)


def sockets(layout):
    """Count the sockets of this rank before it has a context, and after."""

    def count() -> int:
        places = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(os.readlink(p).startswith("socket:") for p in places if os.path.lexists(p))

    before = count()
    ctx = context(**layout)
    ctx.new_cpu_group()
    return before, count()


@pytest.mark.parametrize(
    "layout",
    marked_slow([dict(tp=2, pp=2, dp=2), dict(dp=8), dict(dp=4, cp=2)], lambda number, _: number),
    ids=layout_name,
)
def test_sockets_are_no_more_than_is_asked_for(ranks, layout):
    """Five for each other rank: the world's, the axes', those of two axes together, and those for
    saving."""
    for before, after in ranks(sockets, 8, layout):
        assert after - before <= 4 * 7 + 5  # the world's were there; each group listens, too
