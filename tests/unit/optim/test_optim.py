"""AdamW, the gradient norm and the learning rate against torch and against their formulas."""

import gc
import math
import subprocess
import sys
import weakref

import pytest
import torch

import megazoo
from megazoo.errors import UserError
from megazoo.optim.adamw import AdamW
from megazoo.optim.clip import square_sum
from megazoo.optim.learning_rate import lr_schedule
from tests.support.training import make_batch, randomize, tiny_config


def test_steps_equal_torchs_adamw_with_clipping():
    ours, theirs = (randomize(megazoo.from_config(tiny_config(), seed=3)) for _ in range(2))
    optimizer = AdamW(ours, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, clip_grad=0.2)
    matrices = [p for p in theirs.parameters() if p.dim() > 1]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]  # no decay on biases and norms
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    oracle = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6)
    for step in range(5):
        ids, targets = make_batch(step)
        for model in (ours, theirs):
            model.train_batch(ids, targets=targets)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.2)
        oracle.step()
        torch.testing.assert_close(optimizer.step(), norm)
        assert norm > 0.2
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_zero_turns_clipping_off():
    model = megazoo.from_config(tiny_config(), seed=3)
    ids, targets = make_batch(0)
    model.train_batch(ids, targets=targets)
    before = model.norm.weight.grad.clone()
    AdamW(model, clip_grad=0).step()
    assert torch.equal(model.norm.weight.grad, before)


def test_square_sum_is_exact_for_large_tensors():
    tensor = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = tensor.double().square().sum()
    assert abs(square_sum(tensor) / exact - 1) < 1e-12


def test_zero_grad_and_no_torch_dynamo():
    script = """
import sys, torch, megazoo
model = megazoo.from_config("gpt2-tiny")
optimizer = megazoo.optim.AdamW(model)
ids = torch.zeros(2, 8, dtype=torch.long)
model.train_batch(ids, labels=ids)
optimizer.step()
optimizer.zero_grad()
assert all(not p.grad.any() for p in model.parameters())
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


RATE = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "steps": 110}


COSINE = 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2
RATES = {
    "cosine": {1: 0.1, 10: 1.0, 35: COSINE, 60: 0.55, 110: 0.1, 200: 0.1, 10_000: 0.1},
    "linear": {5: 0.5, 60: 0.55, 110: 0.1, 111: 0.1},
    "constant": {3: 0.3, 110: 1.0},
    "wsd": {88: 1.0, 99: 0.55, 110: 0.1},
}


@pytest.mark.parametrize("schedule", RATES)
def test_learning_rate_schedules(schedule):
    for step, rate in RATES[schedule].items():
        assert lr_schedule(schedule, **RATE).rate(step) == pytest.approx(rate), step


def test_the_last_fifth_begins_after_a_long_warm_up():
    wsd = lr_schedule("wsd", lr=1.0, min_lr=0.0, warmup_steps=90, steps=100)
    rates = [wsd.rate(step) for step in (89, 90, 91, 95, 100)]
    assert rates == pytest.approx([89 / 90, 1.0, 0.9, 0.5, 0.0])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_short_schedules_end_at_the_lowest_rate(schedule):
    for steps, warmup in ((s, w) for s in range(1, 8) for w in range(s)):
        how = {"lr": 1.0, "min_lr": 0.125, "warmup_steps": warmup, "steps": steps}
        assert lr_schedule(schedule, **how).rate(steps) == 0.125, (steps, warmup)


def test_the_decay_of_wsd_has_a_share_and_a_shape():
    """sqrt is the 1-sqrt cooldown of arXiv 2405.18392, section 4."""
    shapes = {"linear": 0.75, "cosine": (1 + math.cos(math.pi / 4)) / 2, "sqrt": 0.5}
    for shape, left in shapes.items():
        wsd = lr_schedule("wsd", **RATE, lr_decay_share=0.8, lr_decay_shape=shape)
        assert wsd.rate(21) == 1.0
        assert wsd.rate(44) == pytest.approx(0.1 + 0.9 * left)
        assert wsd.rate(110) == wsd.rate(120) == 0.1
    whole, none = (lr_schedule("wsd", **RATE, lr_decay_share=share) for share in (1.0, 0.0))
    assert [whole.rate(step) for step in (10, 60)] == pytest.approx([1.0, 0.55])
    assert [none.rate(step) for step in (10, 109, 110)] == [1.0, 1.0, 0.1]


def test_unknown_schedule_is_refused():
    with pytest.raises(UserError, match="unknown lr-schedule 'cosin': use cosine"):
        lr_schedule("cosin", **RATE)


def test_a_model_that_trained_is_freed():
    model = megazoo.from_config(tiny_config())
    optimizer = megazoo.optim.AdamW(model)
    ids = torch.randint(0, 61, (2, 8))
    model.train_batch(ids, labels=ids)
    optimizer.step()
    left = weakref.ref(model), weakref.ref(next(model.parameters()))
    del model, optimizer
    gc.collect()
    assert [reference() for reference in left] == [None, None]
