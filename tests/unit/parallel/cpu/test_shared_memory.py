"""Through shared memory, all-reduces, all-gathers and reduce-scatters give what gloo gives, sums in
the order of the ranks, and messages come as they were sent; no one waits for who will not come."""

import mmap
import os
import random
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

from megazoo.parallel import collectives, p2p
from megazoo.parallel.cpu import shared_memory
from megazoo.parallel.cpu.shared_memory import SLOT_BYTES, Mailboxes, Reducer, shared_by
from tests.support.training import context

pytestmark = pytest.mark.skipif(shared_memory._host() is None, reason="the host can't share memory")


def parts_of(shape, dtype, size):
    generator = torch.Generator().manual_seed(len(shape) + size)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)]


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OPS = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def reduced(size, cases, op=dist.ReduceOp.SUM):
    """For each shape and dtype: by shared memory, in place and not, and by gloo."""
    ctx, results = context(tp=size), []
    assert shared_by(ctx.tp_group, Reducer)
    for shape, dtype in cases:
        mine = parts_of(shape, dtype, size)[ctx.tp_rank]
        ours, theirs = mine.clone(), mine.clone()
        collectives.all_reduce(ours, ctx.tp_group, op)
        if op == dist.ReduceOp.SUM:
            assert torch.equal(collectives.summed(mine, ctx.tp_group), ours)
        dist.all_reduce(theirs, op, ctx.tp_group)
        assert ours.shape == shape
        results.append((ours, theirs))
    return results


@pytest.mark.parametrize("op", OPS, ids=str)
def test_two_ranks_get_what_gloo_gives_to_the_bit(ranks, op):
    cases = list(product([(), (1,), (7, 33), (0,)], DTYPES))
    cases += [((SLOT_BYTES // 4 + 5,), dtype) for dtype in (torch.float32, torch.bfloat16)]
    for results in ranks(reduced, 2, 2, cases, op):
        for case, (ours, theirs) in zip(cases, results, strict=True):
            assert torch.equal(ours, theirs), case


def test_more_ranks_add_in_their_order(ranks):
    parts = parts_of((7, 33), torch.float32, 4)
    expected = parts[0] + parts[1] + parts[2] + parts[3]
    for ((ours, theirs),) in ranks(reduced, 4, 4, [((7, 33), torch.float32)]):
        assert torch.equal(ours, expected)
        torch.testing.assert_close(ours, theirs)


def multiples(part, count):
    """The part once, twice, ..., one after the other along dimension -2: each rank is to get
    another one."""
    return torch.cat([part * (number + 1) for number in range(count)], dim=-2)


def gathered_and_scattered(size, cases):
    """For each shape and dtype, of such a tensor and a value that is this rank's: gathered and
    scattered along dimension -2, and along the last one in uneven parts. By shared memory, and by
    gloo."""
    ctx, results = context(tp=size), []
    for shape, dtype in cases:
        mine, both = parts_of(shape, dtype, size)[ctx.tp_rank], []
        sizes = [shape[-1] - rank % 2 for rank in range(size)]
        assert shared_by(ctx.tp_group, Reducer)
        for reducer in (shared_by(ctx.tp_group, Reducer), None):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(shared_memory, "shared_by", lambda *_, reducer=reducer: reducer)
                both.append(
                    [
                        collectives.all_gather_sequence(mine, ctx.tp_group),
                        collectives.reduce_scatter_sequence(multiples(mine, size), ctx.tp_group),
                        collectives.all_gather_last_dim(
                            mine[..., : sizes[ctx.tp_rank]], ctx.tp_group, sizes
                        ),
                    ]
                )
        results.append(both)
    return results


def test_two_ranks_gather_and_scatter_as_by_gloo_to_the_bit(ranks):
    cases = list(product([(1, 1), (3, 5, 7), (3, 0, 4)], DTYPES))
    cases += [((2, SLOT_BYTES // 8 + 3, 2), dtype) for dtype in (torch.float32, torch.bfloat16)]
    for rank, results in enumerate(ranks(gathered_and_scattered, 2, 2, cases)):
        for case, (ours, theirs) in zip(cases, results, strict=True):
            parts = parts_of(*case, 2)
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), case
            assert torch.equal(ours[0], torch.cat(parts, dim=-2)), case
            total = multiples(parts[0], 2) + multiples(parts[1], 2)
            assert torch.equal(ours[1], total.chunk(2, dim=-2)[rank]), case
            assert torch.equal(ours[2], torch.cat([parts[0], parts[1][..., :-1]], dim=-1)), case


def test_more_ranks_gather_and_scatter_in_their_order(ranks):
    shape = 2, 4, 3
    parts = parts_of(shape, torch.float32, 4)
    total = sum(multiples(part, 4) for part in parts)
    for rank, results in enumerate(ranks(gathered_and_scattered, 4, 4, [(shape, torch.float32)])):
        ((ours, theirs),) = results
        assert torch.equal(ours[0], torch.cat(parts, dim=-2))
        assert torch.equal(ours[1], total.chunk(4, dim=-2)[rank])
        torch.testing.assert_close(ours[1], theirs[1])
        assert torch.equal(ours[2], theirs[2])


def many(size, rounds):
    """Rounds in which each rank is late at random; returns how many were wrong."""
    ctx = context(tp=size)
    chance, late, wrong = random.Random(0), random.Random(ctx.tp_rank), 0
    for number in range(rounds):
        length = chance.randint(1, 5000)
        if late.random() < 0.2:
            time.sleep(late.random() * 3e-3)
        total = torch.full((length,), float(number + ctx.tp_rank))
        collectives.all_reduce(total, ctx.tp_group)
        wrong += not torch.equal(
            total, torch.full((length,), number * size + size * (size - 1) / 2)
        )
    return wrong


@pytest.mark.parametrize(
    ("size", "rounds"), [(2, 100), (3, 100), pytest.param(4, 300, marks=pytest.mark.slow)]
)
def test_no_round_reads_what_another_writes(ranks, size, rounds):
    assert ranks(many, size, size, rounds) == [0] * size


def by_gloo(size, missing):
    """Whether there is no shared memory, and a sum: where the ranks' hosts differ, or the system
    refuses a call."""
    ctx = context(tp=size)
    with pytest.MonkeyPatch.context() as patch:
        if missing != "one host":
            patch.setattr(os, missing, lambda *_: os.open("/nowhere", os.O_RDONLY))
        elif ctx.tp_rank == 1:
            patch.setattr(shared_memory, "_host", lambda: ("elsewhere",))
        total = torch.ones(3)
        collectives.all_reduce(total, ctx.tp_group)
        return shared_by(ctx.tp_group, Reducer) is None, total.tolist()


@pytest.mark.parametrize(
    ("size", "missing"), [(3, "one host"), (2, "memfd_create"), (2, "truncate")]
)
def test_ranks_that_can_share_no_memory_use_gloo(ranks, size, missing):
    assert ranks(by_gloo, size, size, missing) == [(True, [float(size)] * 3)] * size


SHAPES = [
    (),
    (0,),
    (1,),
    (7, 33),
    (2, SLOT_BYTES // 8),
    (SLOT_BYTES // 4 + 1,),
    (3, SLOT_BYTES // 8),
]


def message(source, target, number, shape, dtype):
    generator = torch.Generator().manual_seed(1000 * source + 100 * target + number)
    return torch.randint(-99, 99, shape, generator=generator).to(dtype)


def talk(size, rounds):
    """Rounds in which each rank, late at random, sends a tensor to each other, and takes two of
    each at a time, the younger first; returns how many were wrong, and how many works of sends
    there were."""
    ctx, chance, wrong, awaited, works = context(pp=size), random.Random(0), 0, [], []
    late, peers = random.Random(ctx.pp_rank), [rank for rank in range(size) if rank != ctx.pp_rank]
    for number in range(rounds):
        what = (
            number,
            chance.choice(SHAPES),
            chance.choice((torch.float32, torch.bfloat16, torch.int64)),
        )
        buffers = [(torch.empty(what[1], dtype=what[2]), peer) for peer in peers]
        sent = [(message(ctx.pp_rank, peer, *what), peer) for peer in peers]
        if late.random() < 0.2:
            time.sleep(late.random() * 3e-3)
        coming = [p2p.start_receive(*each, ctx) for each in buffers]
        going = [(p2p.start_send(*each, ctx), each) for each in sent]
        works += [each for each in going if each[0]]
        awaited += [(what, *each) for each in zip(buffers, coming, strict=True)]
        if number % 2:
            for what, (buffer, peer), arrival in reversed(awaited):
                arrival.wait()
                wrong += not torch.equal(buffer, message(peer, ctx.pp_rank, *what))
            awaited = []
    for work, _ in works:
        work.wait()
    return wrong, len(works)


@pytest.mark.parametrize(
    ("size", "rounds"), [(2, 30), (3, 10), pytest.param(3, 40, marks=pytest.mark.slow)]
)
def test_messages_of_any_size_come_as_they_were_sent(ranks, size, rounds):
    """Those too large for a slot go by gloo, in their own order."""
    for wrong, by_gloo in ranks(talk, size, size, rounds):
        assert wrong == 0
        assert 0 < by_gloo < rounds * (size - 1)


def talk_apart(size, rounds):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_host", lambda: None)
        return talk(size, rounds)


def test_messages_between_hosts_go_by_gloo(ranks):
    assert ranks(talk_apart, 2, 2, 10) == [(0, 10)] * 2


def shared_with(pid, seconds, kind):
    memory = mmap.mmap(-1, kind.nbytes(2))
    return kind(memory, [os.getpid(), pid], 0, timedelta(seconds=seconds))


def reduce_with(pid, seconds):
    return partial(shared_with(pid, seconds, Reducer).all_reduce, torch.ones(3), torch.ones(3))


def receive_from(pid, seconds):
    return shared_with(pid, seconds, Mailboxes).receive(torch.ones(3), 1).wait


def send_to(pid, seconds):
    """One message more than there is room for."""
    boxes = shared_with(pid, seconds, Mailboxes)
    for _ in range(boxes.slots_each(2)):
        boxes.send(torch.ones(3), 1)
    return partial(boxes.send, torch.ones(3), 1)


@pytest.mark.parametrize("start", [reduce_with, receive_from, send_to])
def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_timeout(start):
    do = start(os.getppid(), 0.3)
    with pytest.raises(RuntimeError, match=r"timed out after \d+ s waiting for process \d+"):
        do()


@pytest.mark.parametrize("start", [reduce_with, receive_from, send_to])
def test_a_rank_that_has_died_is_not_waited_for(start):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    while os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.01)
    for _ in range(2):  # first it is a zombie
        do = start(ended.pid, 60)
        with pytest.raises(RuntimeError, match=r"connection closed by peer: process \d+ has ended"):
            do()
        ended.wait()
