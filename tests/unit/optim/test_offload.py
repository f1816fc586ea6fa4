"""What CUDA computes in another way than the CPU, on the CPU: the update through staged pieces, the
norm by lists, the scale of clipping, the size of buckets."""

import math
from collections import deque
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest
import torch

import megazoo
from megazoo.optim.adamw import AdamW
from megazoo.optim.clip import clip_scale, square_sum, square_sum_at_once
from megazoo.optim.offload import ALIGNMENT, Row, Staging, cut
from megazoo.parallel.buckets import elements_for
from tests.support.training import (
    context,
    make_batch,
    randomize,
    replica_rows,
    run_in_layout,
    tiny_config,
)


def staged_and_not(dtype, settings, layout):
    """Parameters and state after three steps, updated through pieces of 640 elements, and at
    once."""
    ctx, found = context(**layout), []
    for staged in (True, False):
        model = randomize(megazoo.from_config(tiny_config(), ctx, dtype=dtype, seed=3))
        optimizer = AdamW(model, lr=1e-2, offload=True, **settings)
        if staged:
            optimizer.staging = Staging(ctx.device, dtype, 640)
        for step in range(3):
            ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
            model.train_batch(ids, targets=targets, step=step)
            optimizer.step()
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        found.append([*model.parameters(), *states])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("dtype", "clip"), [(torch.float32, 0.0), (torch.bfloat16, 0.2), (torch.float32, 1e6)], ids=str
)
def test_staged_pieces_are_updated_as_the_whole(dtype, clip):
    staged_and_not(dtype, {"clip_grad": clip}, {})


def test_staged_pieces_are_updated_as_the_whole_under_zero_1(ranks):
    run_in_layout(ranks, staged_and_not, dict(dp=2), torch.bfloat16, {"clip_grad": 0.2, "zero": 1})


def test_pieces_hold_every_element_once_and_begin_aligned():
    lengths = [1, 64, 0, 1000, 63, 5]
    weights = torch.arange(sum(lengths)).split(lengths)
    pieces = cut([Row(part, part, [part]) for part in weights], 256)
    assert torch.equal(
        torch.cat([row.weights for piece in pieces for row in piece]), torch.arange(sum(lengths))
    )
    for piece in pieces:
        assert sum(-(-row.weights.numel() // ALIGNMENT) * ALIGNMENT for row in piece) <= 256
        assert all(torch.equal(row.weights, row.states[0]) for row in piece)


def test_a_replica_without_a_part_updates_nothing():
    nothing = torch.empty(0)
    Staging(torch.device("cpu"), torch.float32, 640).update(
        [Row(nothing, nothing, [nothing])], None, lambda *_: pytest.fail("there is nothing")
    )


class Late(torch.Tensor):
    """A tensor of the CPU that stands for a device's: what changes it, or copies it to the CPU, is
    queued, and done when somebody waits for it."""

    changes = (torch.Tensor.copy_, torch.Tensor.div_, torch._foreach_copy_)
    queue: ClassVar[deque] = deque()  # of (number, what is to be called)
    queued = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        call = partial(super().__torch_function__, function, types, args, kwargs)
        if function not in cls.changes:
            return call()
        Late.queued += 1
        cls.queue.append((Late.queued, call))
        return args[0]

    @classmethod
    def make(cls, last: int) -> None:
        """Do what is queued, up to number `last`."""
        while cls.queue and cls.queue[0][0] <= last:
            cls.queue.popleft()[1]()


class Event:
    """An event of that device. waits: for all of them."""

    waits = 0

    def __init__(self, blocking):
        self.last = None

    def record(self):
        self.last = Late.queued

    def synchronize(self):
        Event.waits += 1
        Late.make(self.last)


@pytest.fixture
def device(monkeypatch):
    """A device that does everything at the last moment, and memory full of nonsense."""
    empty = torch.empty

    def nonsense(*shape, device="cpu", pin_memory=False, **options):
        made = empty(*shape, **options).fill_(math.nan)
        return made.as_subclass(Late) if torch.device(device).type == "cuda" else made

    monkeypatch.setattr(torch, "empty", nonsense)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Late.queue.clear()
    Late.queued = Event.waits = 0
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("lengths", "scaled"),
    [
        ([(640,)], True),
        ([(100, 70, 3000), (5, 1300)], False),
        ([(100, 70, 3000), (5, 1300)], True),
        ([(9,), (9,), (0,)], False),
    ],
)
def test_staged_memory_is_used_again_only_after_its_copies(device, lengths, scaled):
    """Of one piece, of several, and of two groups of parameters that follow each other, in three
    steps: the sums of the gradients, in bfloat16."""
    staging, scale = Staging(device, torch.bfloat16, 640), torch.tensor(4.0).as_subclass(Late)
    groups, expected = [], [[torch.zeros(n) for n in group] for group in lengths]
    for group in lengths:
        weights = [torch.zeros(n, dtype=torch.bfloat16).as_subclass(Late) for n in group]
        groups.append([(each, [torch.zeros(n)]) for each, n in zip(weights, group, strict=True)])

    def add(gradients, states):
        for gradient, (state,) in zip(gradients, states, strict=True):
            state += gradient

    pieces = 0
    for _ in range(3):
        for group, sums in zip(groups, expected, strict=True):
            rows = []
            for (weights, states), total in zip(group, sums, strict=True):
                gradient = torch.randn(len(total))
                total += gradient / 4 if scaled else gradient
                rows.append(Row(weights, gradient.as_subclass(Late), states))
            staging.update(rows, scale if scaled else None, add)
            pieces += len(cut(rows, 640))
    assert Event.waits == pieces
    Late.make(Late.queued)
    for group, sums in zip(groups, expected, strict=True):
        for (weights, (state,)), total in zip(group, sums, strict=True):
            assert torch.equal(state, total)
            assert torch.equal(weights.as_subclass(torch.Tensor), total.bfloat16())


def test_threads_are_as_before_after_an_offloaded_update(monkeypatch):
    """After one that fails, too."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    torch.set_num_threads(3)  # each test begins with one
    row, seen = torch.zeros(5), []

    def update(*_):
        seen.append(torch.get_num_threads())
        raise ValueError("a failure")

    staging = Staging(torch.device("cpu"), torch.float32, 640)
    with pytest.raises(ValueError, match="a failure"):
        staging.update([Row(row, row, [row])], None, update)
    assert (seen, torch.get_num_threads()) == ([1], 3)


def test_the_norm_by_lists_is_that_by_pieces():
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(shape, generator=generator) * 1e-3
        for shape in [(10_000_000,), (300, 700), (5,), (1,)]
    ]
    expected = sum(map(square_sum, tensors))
    assert abs(square_sum_at_once(tensors) / expected - 1) < 1e-12
    exact = sum(tensor.double().square().sum() for tensor in tensors)
    assert abs(square_sum_at_once(tensors) / exact - 1) < 1e-12


def test_the_scale_on_a_device_is_1_where_nothing_is_clipped():
    for norm in map(torch.tensor, (0.0, 0.1, 0.2, 0.200001, 7.0, math.inf, math.nan)):
        expected = (norm + 1e-6) / 0.2 if norm > 0.2 else torch.tensor(1.0)
        assert torch.equal(clip_scale(norm, 0.2), expected), norm


def test_buckets_on_cuda_grow_with_the_replicas():
    for dp, elements in ((2, 40_000_000), (8, 40_000_000), (64, 64_000_000)):
        ctx = megazoo.ParallelContext.virtual(dp=dp)
        assert elements_for(replace(ctx, device=torch.device("cuda", 0))) == elements
        assert elements_for(replace(ctx, device=torch.device("cpu"))) == 1 << 23
