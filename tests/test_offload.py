"""What CUDA computes in another way than the CPU, on the CPU: the update through staged pieces, the
norm by lists, the scale of clipping, the size of buckets."""

import dataclasses
import math

import pytest
import torch
from helpers import context, make_batch, randomize, replica_rows, run_in_layout, tiny_config

import megazoo
from megazoo.optim.adamw import AdamW
from megazoo.optim.clip import clip_scale, square_sum, square_sum_at_once
from megazoo.optim.offload import ALIGNMENT, Row, Staging, all_cores, cut
from megazoo.parallel.buckets import elements_for


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("clip", [0.0, 0.2, 1e6])
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


def test_threads_are_as_before_after_an_offloaded_update(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    with all_cores():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


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


@pytest.mark.parametrize("norm", [0.0, 0.1, 0.2, 0.200001, 7.0, math.inf, math.nan])
def test_the_scale_on_a_device_is_1_where_nothing_is_clipped(norm):
    norm, most = torch.tensor(norm), 0.2
    expected = (norm + 1e-6) / most if norm > most else torch.tensor(1.0)
    assert torch.equal(clip_scale(norm, most), expected)


@pytest.mark.parametrize(("dp", "elements"), [(2, 40_000_000), (8, 40_000_000), (64, 64_000_000)])
def test_buckets_on_cuda_grow_with_the_replicas(dp, elements):
    ctx = megazoo.ParallelContext.virtual(dp=dp)
    assert elements_for(dataclasses.replace(ctx, device=torch.device("cuda", 0))) == elements
    assert elements_for(dataclasses.replace(ctx, device=torch.device("cpu"))) == 1 << 23
