"""All-reduces through shared memory: what gloo gives, in the order of the ranks, and no wait for who will not come."""

import mmap
import os
import random
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import context

from megazoo.parallel import collectives, shared_memory
from megazoo.parallel.shared_memory import FLAG_BYTES, SLOT_BYTES, Exchange, exchange_of

pytestmark = pytest.mark.skipif(shared_memory._host() is None, reason="the host can't share memory")


def parts_of(shape, dtype, size):
    generator = torch.Generator().manual_seed(len(shape) + size)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)]


def reduced(size, shape, dtype, op):
    """By shared memory, in place and not, and by gloo."""
    ctx = context(tp=size)
    mine = parts_of(shape, dtype, size)[ctx.tp_rank]
    ours, theirs = mine.clone(), mine.clone()
    assert exchange_of(ctx.tp_group)
    collectives.all_reduce(ours, ctx.tp_group, op)
    if op == dist.ReduceOp.SUM:
        assert torch.equal(collectives.summed(mine, ctx.tp_group), ours)
    dist.all_reduce(theirs, op, ctx.tp_group)
    return ours, theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7, 33), (SLOT_BYTES // 4 + 5,), (0,)], ids=str)
def test_two_ranks_get_what_gloo_gives_to_the_bit(ranks, shape, dtype):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        for ours, theirs in ranks(reduced, 2, 2, shape, dtype, op):
            assert ours.shape == shape
            assert torch.equal(ours, theirs)


def test_more_ranks_add_in_their_order(ranks):
    parts = parts_of((7, 33), torch.float32, 4)
    expected = parts[0] + parts[1] + parts[2] + parts[3]
    for ours, theirs in ranks(reduced, 4, 4, (7, 33), torch.float32, dist.ReduceOp.SUM):
        assert torch.equal(ours, expected)
        torch.testing.assert_close(ours, theirs)


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
        wrong += not torch.equal(total, torch.full((length,), number * size + size * (size - 1) / 2))
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_round_reads_what_another_writes(ranks, size):
    assert ranks(many, size, size, 300) == [0] * size


def apart(size):
    real, ctx = shared_memory._host, context(tp=size)
    if ctx.tp_rank == 1:
        shared_memory._host = lambda: ("elsewhere",)
    try:
        total = torch.ones(3)
        collectives.all_reduce(total, ctx.tp_group)
        return exchange_of(ctx.tp_group) is None, total.tolist()
    finally:
        shared_memory._host = real


def test_ranks_of_two_hosts_use_gloo(ranks):
    assert ranks(apart, 3, 3) == [(True, [3.0] * 3)] * 3


def refused(size):
    ctx = context(tp=size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "memfd_create", lambda name: os.open("/nowhere", os.O_RDONLY))
        total = torch.ones(3)
        collectives.all_reduce(total, ctx.tp_group)
        return exchange_of(ctx.tp_group) is None, total.tolist()


def test_ranks_that_may_make_no_memory_use_gloo(ranks):
    assert ranks(refused, 2, 2) == [(True, [2.0] * 3)] * 2


def exchange_with(pid, seconds):
    memory = mmap.mmap(-1, 2 * (FLAG_BYTES + 2 * SLOT_BYTES))
    return Exchange(memory, [os.getpid(), pid], 0, timedelta(seconds=seconds))


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_timeout():
    with pytest.raises(RuntimeError, match=r"timed out after \d+ s waiting for process \d+ in an all-reduce"):
        exchange_with(os.getppid(), 0.3).all_reduce(torch.ones(3), torch.ones(3))


def test_a_rank_that_has_died_is_not_waited_for():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    while os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.01)
    for _ in range(2):  # first it is a zombie
        with pytest.raises(RuntimeError, match=r"connection closed by peer: process \d+ has ended"):
            exchange_with(ended.pid, 60).all_reduce(torch.ones(3), torch.ones(3))
        ended.wait()
