"""bfloat16: low-precision weights and activations over fp32 masters, gradients and moments."""

import json

import pytest
import torch
from helpers import make_batch, tiny_config
from test_checkpoint import run_steps

import megazoo
import pretrain_gpt
from megazoo.checkpoint import Checkpoint, load, save


def test_gradients_accumulate_in_fp32_and_follow_fp32():
    grads = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = megazoo.from_config(tiny_config(), seed=3, dtype=dtype)
        ids, targets = make_batch(0)
        model.train_batch(ids, targets=targets, num_microbatches=8)
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        grads[dtype] = torch.cat([p.grad.flatten() for p in model.parameters()])
    difference = (grads[torch.bfloat16] - grads[torch.float32]).norm() / grads[torch.float32].norm()
    assert 0 < difference < 0.02


def test_masters_add_up_steps_that_bfloat16_would_lose():
    model = megazoo.from_config(tiny_config(), seed=3, dtype=torch.bfloat16)
    optimizer = megazoo.optim.AdamW(model, lr=5e-5, weight_decay=0.0)
    ids, targets = make_batch(0)
    weight, master = model.norm.weight, optimizer.state["norm.weight"]["master"]
    for step in range(200):
        model.train_batch(ids, targets=targets)
        optimizer.step()
        if step == 0:  # the weights are ones, and bfloat16's neighbours of 1 are 0.004 and 0.008 away
            assert weight.eq(1).all()
            assert master.ne(1).all()
    assert weight.ne(1).any()
    assert torch.equal(weight, master.bfloat16())


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 2}], ids=str)
def test_stop_and_resume_is_bit_for_bit(ranks, tmp_path, layout):
    config, size = tiny_config(dropout=0.1), 4 if layout else 1
    straight = ranks(run_steps, size, layout, config, 6, dtype=torch.bfloat16)
    first = ranks(run_steps, size, layout, config, 3, tmp_path, dtype=torch.bfloat16)
    second = ranks(run_steps, size, layout, config, 3, None, tmp_path, dtype=torch.bfloat16)
    for whole, before, after in zip(straight, first, second, strict=True):
        assert whole[0] == before[0] + after[0]
        assert all(torch.equal(whole[1][name], after[1][name]) for name in whole[1])


def test_weights_load_into_another_dtype(tmp_path):
    """From bfloat16 into fp32 come the masters; from fp32 into bfloat16 the masters are the weights."""
    for saved, other in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        model = megazoo.from_config(tiny_config(), dtype=saved)
        optimizer = megazoo.optim.AdamW(model)
        ids, targets = make_batch(0)
        model.train_batch(ids, targets=targets)
        optimizer.step()
        save(tmp_path / str(saved), 1, model, optimizer)
        into = megazoo.from_config(tiny_config(), seed=9, dtype=other)
        theirs = megazoo.optim.AdamW(into)
        load(Checkpoint(tmp_path / str(saved)), into, theirs)
        for entry in model.entries():
            exact = optimizer.state[entry.name].get("master", entry.parameter)
            loaded = theirs.state[entry.name].get("master", dict(into.named_parameters())[entry.name])
            assert torch.equal(loaded, exact)


def test_training_in_bfloat16_follows_fp32(tmp_path):
    """The default job, smaller: after sixty steps of real text the losses agree within 2 %."""
    arguments = "--hidden-size 64 --layers 2 --seq-length 64 --global-batch-size 16 --steps 60 --eval-steps 0".split()
    curves = []
    for dtype in ("float32", "bfloat16"):
        metrics = tmp_path / dtype
        pretrain_gpt.main([*arguments, "--dtype", dtype, "--device", "cpu", "--metrics", str(metrics)])
        curves.append([json.loads(line)["loss"] for line in metrics.read_text().splitlines()])
    assert max(abs(b / a - 1) for a, b in zip(*curves, strict=True)) < 0.02
    assert curves[1][-1] < 3.6
