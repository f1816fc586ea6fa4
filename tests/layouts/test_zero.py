"""ZeRO-1 and the offloaded optimizer: the same parameters and checkpoints, half of the state."""

import itertools
from itertools import pairwise

import pytest
import torch

import megazoo
from megazoo.checkpoint import Checkpoint, load, save
from megazoo.optim.adamw import AdamW
from megazoo.parallel.buckets import ALIGNMENT, GradientBuckets
from tests.support.sampling import pairs_covered
from tests.support.training import (
    MODELS,
    context,
    layout_name,
    make_batch,
    randomize,
    replica_rows,
    run_in_layout,
    tiny_config,
)

DP = [dict(dp=2), dict(dp=4), dict(tp=2, dp=2), dict(pp=2, dp=2), dict(tp=2, dp=2, sp=True)]
CONFIGS = {
    "gpt2": tiny_config(),
    "llama": MODELS["llama"],
    "llama, one KV head": MODELS["llama, one KV head"],
}


def parts(model):
    """This rank's parameters by name, copied."""
    return {entry.name: entry.parameter.detach().clone() for entry in model.entries()}


def trained(
    config, layout, dtype=torch.float32, steps=5, path=None, small_buckets=True, **settings
):
    """Train some steps; returns parameters, gradient norms and elements of state on this rank."""
    ctx = context(**layout)
    model = randomize(megazoo.from_config(config, ctx, dtype=dtype, seed=3))
    if small_buckets:  # several of them, so that parameters begin and end within shards
        entries = list(model.entries())
        late = {
            e.parameter for e in entries if len(e.pp_ranks) > 1 or e.spec.has_partial_gradient(ctx)
        }
        model._buckets = GradientBuckets([e.parameter for e in entries], ctx, 3000, late)
    optimizer, norms = AdamW(model, lr=1e-2, **settings), []
    for step in range(steps):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        model.train_batch(ids, targets=targets, num_microbatches=2, step=step)
        norms.append(optimizer.step().item())
    state = sum(tensor.numel() for states in optimizer.state.values() for tensor in states.values())
    if path:
        save(path, steps, model, optimizer)
    return parts(model), norms, state


def trained_both_ways(config, clip, layout):
    """Without ZeRO, and with it."""
    return [trained(config, layout, steps=3, clip_grad=clip, zero=zero) for zero in (0, 1)]


def case_name(part) -> str:
    return (
        layout_name(part)
        if isinstance(part, dict)
        else part
        if isinstance(part, str)
        else f"clip {part:g}"
    )


CASES = list(itertools.product(CONFIGS, DP, (0.0, 0.2)))
FEW = pairs_covered(list(CONFIGS), DP, [0.0, 0.2])


@pytest.mark.parametrize(
    ("model", "layout", "clip"),
    [case if case in FEW else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
    ids=case_name,
)
def test_zero_1_gives_the_parameters_of_zero_0(ranks, model, layout, clip):
    """Bit for bit at dp 2 where nothing is clipped; the norm's sum has another order."""
    both = run_in_layout(ranks, trained_both_ways, layout, CONFIGS[model], clip)
    for (expected, norms, _), (ours, our_norms, _) in both:
        assert our_norms == pytest.approx(norms, rel=1e-6)
        assert all(norm > 0.2 for norm in norms)
        for name, parameter in ours.items():
            if clip or layout["dp"] > 2:
                torch.testing.assert_close(parameter, expected[name], atol=1e-6, rtol=1e-6)
            else:
                assert torch.equal(parameter, expected[name]), name
    for (*_, whole), (*_, share) in both:
        # these buckets are small, and cut at whole vectors
        assert abs(share - whole / layout["dp"]) < 0.1 * whole


def test_each_replica_has_its_share_of_the_state(ranks):
    *_, whole = trained(CONFIGS["gpt2"], {}, steps=1)
    for dp in (2, 4):
        shares = [
            share
            for *_, share in ranks(
                trained, dp, CONFIGS["gpt2"], dict(dp=dp), steps=1, small_buckets=False, zero=1
            )
        ]
        assert sum(shares) == whole
        assert max(shares) < 1.01 * whole / dp


def run_of(config, layout, steps, path=None, start=None, dtype=torch.float32, **settings):
    """Losses of a run that may begin with a checkpoint and end with one."""
    ctx = context(**layout)
    model = randomize(megazoo.from_config(config, ctx, dtype=dtype, seed=3))
    optimizer, losses, first = AdamW(model, lr=1e-2, **settings), [], 0
    if start:
        first = load(Checkpoint(start), model, optimizer)["step"]
    for step in range(first, steps):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        losses.append(model.train_batch(ids, targets=targets, num_microbatches=2, step=step).item())
        losses.append(optimizer.step().item())
    if path:
        save(path, steps, model, optimizer)
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpoints_know_nothing_of_zero(ranks, tmp_path, dtype):
    """What dp 4 saves under ZeRO-1 is to the bit what dp 4 saves without, and goes on in any
    layout."""
    config = CONFIGS["llama, one KV head"]
    layout = dict(tp=2, dp=2)
    for zero in (0, 1):
        run_in_layout(
            ranks,
            run_of,
            layout,
            config,
            steps=3,
            path=tmp_path / str(zero),
            zero=zero,
            clip_grad=0,
            dtype=dtype,
        )
    ours, theirs = (Checkpoint(tmp_path / str(zero)) for zero in (1, 0))
    assert ours.tensors.keys() == theirs.tensors.keys()
    for file in theirs.file_sizes():
        if file.endswith("safetensors"):
            assert (ours.path / file).read_bytes() == (theirs.path / file).read_bytes(), file
    straight = run_in_layout(
        ranks, run_of, layout, config, steps=5, zero=1, clip_grad=0, dtype=dtype
    )[0][6:]
    for later, settings in [
        (dict(dp=4), {"zero": 1}),
        (dict(tp=2, pp=2), {}),
        ({}, {"offload": True}),
        (layout, {"zero": 1}),
    ]:
        losses = run_in_layout(
            ranks,
            run_of,
            later,
            config,
            steps=5,
            start=tmp_path / "1",
            clip_grad=0,
            dtype=dtype,
            **settings,
        )[0]
        assert losses == pytest.approx(straight, rel=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("layout", [{}, dict(dp=2), dict(pp=2, dp=2)], ids=layout_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_offloaded_optimizer_gives_the_same_parameters(ranks, layout, dtype):
    """With bfloat16 and a pipeline together, too; there the state is masters and moments either
    way."""
    for zero in (0, 1):
        results = [
            run_in_layout(
                ranks, trained, layout, CONFIGS["gpt2"], dtype=dtype, zero=zero, offload=offload
            )
            for offload in (False, True)
        ]
        for (expected, norms, _), (ours, our_norms, _) in zip(*results, strict=True):
            assert our_norms == norms
            assert all(torch.equal(ours[name], expected[name]) for name in expected)


def overflowing(layout, zero):
    ctx = context(**layout)
    model = megazoo.from_config(tiny_config(), ctx, dtype=torch.float16, seed=3)
    optimizer = AdamW(model, zero=zero)
    optimizer.loss_scale.value, before = 2.0**40, parts(model)
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    model.train_batch(ids, targets=targets)
    optimizer.step()
    return optimizer.skipped, all(
        torch.equal(before[name], part) for name, part in parts(model).items()
    )


def test_an_overflow_on_any_replica_skips_the_step_of_all(ranks):
    assert ranks(overflowing, 2, dict(dp=2), 1) == [(True, True)] * 2


def test_an_unknown_zero_is_refused():
    with pytest.raises(megazoo.UserError, match="zero 2 is neither 0 nor 1"):
        AdamW(megazoo.from_config(tiny_config()), zero=2)


def test_ranges_cover_every_parameter_once_and_begin_aligned():
    for dp in (1, 2, 3, 8):
        contexts = [megazoo.ParallelContext.virtual(dp=dp, rank=rank) for rank in range(dp)]
        parameters = list(megazoo.from_config(tiny_config()).parameters())
        buckets = GradientBuckets(parameters, contexts[0], 3000)
        for parameter in parameters:
            ranges = [buckets.range_of(parameter, rank) for rank in range(dp)]
            filled = [each for each in ranges if each[0] < each[1]]
            assert filled[0][0] == 0
            assert filled[-1][1] == parameter.numel()
            assert all(a[1] == b[0] for a, b in pairwise(filled))
            assert all(first % ALIGNMENT == 0 for first, _ in filled)
