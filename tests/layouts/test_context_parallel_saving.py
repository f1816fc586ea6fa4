"""Checkpoints know nothing of context parallelism: their files are those of a data-parallel run,
and a run goes on from them at another cp, with the optimizer's state."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import megazoo
from megazoo.checkpoint import Checkpoint, load, save
from tests.support.context_parallel import batch_of, cp_name, model_in, rows_of_replica
from tests.support.training import CLIP, MODELS, context, tiny_config, world, worst_relative

LLAMA, GPT2 = replace(MODELS["llama"], layers=2), tiny_config(layers=2)
ULYSSES = dict(cp=2, method="ulysses")


def run(layout: dict, config, steps: range, directory=None, resume=None, **optimizer):
    """Losses and norms of some steps, numbered from 0; saves after the last."""
    ctx = context(**layout)
    model = model_in(config, ctx)
    opt = megazoo.optim.AdamW(model, lr=1e-3, clip_grad=CLIP, **optimizer)
    if resume:
        assert load(Checkpoint(resume), model, opt)["step"] == steps.start
    history = []
    for step in steps:
        batch = rows_of_replica(batch_of(step, "documents"), ctx)
        history.append((model.train_batch(**batch, step=step).item(), opt.step().item()))
    if directory:
        save(directory, steps.stop, model, opt)
    return history


@pytest.mark.parametrize(
    ("before", "afters"),
    [
        (dict(cp=2), [dict(cp=3, method="ulysses"), {}]),
        (dict(dp=2, cp=2), [dict(tp=2, cp=2, sp=True)]),
        ({}, [dict(dp=2, cp=2)]),
        (dict(pp=2, cp=2), [dict(dp=2)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("zero", [0, 1])
def test_a_run_goes_on_at_another_cp(ranks, tmp_path, before, afters, zero):
    expected = run({}, LLAMA, range(6))
    ranks(run, world(before), before, LLAMA, range(3), tmp_path, zero=zero)
    for after in afters:
        args = (after, LLAMA, range(3, 6), None, tmp_path)
        history = ranks(run, world(after), *args, zero=1 - zero)[0]
        assert worst_relative(history, expected[3:]) < 1e-5, after


def test_each_tensor_is_written_once_and_files_are_those_of_replicas(ranks, tmp_path):
    ranks(run, 4, dict(dp=2, cp=2), GPT2, range(2), tmp_path / "cp", zero=1)
    ranks(run, 4, dict(dp=4), GPT2, range(2), tmp_path / "dp", zero=1)
    with_cp, without = (tmp_path / kind / "step_00000002" for kind in ("cp", "dp"))
    names = {path.name for path in with_cp.iterdir()}
    assert names == {path.name for path in without.iterdir()}
    optimizers = {f"optimizer_tp_0_pp_0_dp_{replica}.safetensors" for replica in range(4)}
    assert optimizers < names
    manifest = json.loads((with_cp / "megazoo.json").read_text())
    assert manifest["layout"] == {"tp": 1, "pp": 1, "dp": 4}
    stored = Counter(tensor for path in with_cp.glob("*.safetensors") for tensor in load_file(path))
    assert set(stored.values()) == {1}


def saved_parallelized(layout: dict, directory, merged):
    model = model_in(GPT2, context(**layout))
    model.save_parallelized(directory)
    model.save_parallelized(merged, merge_checkpoints=True)
    return model.eval_batch(**batch_of(0)).item()


def loss_of_loaded(layout: dict, directory):
    ctx = context(**layout)
    model = megazoo.from_config(GPT2, ctx, seed=99).from_parallelized(directory)
    again = megazoo.from_pretrained(directory, ctx)
    batch = rows_of_replica(batch_of(0), ctx)
    assert torch.equal(model.eval_batch(**batch), again.eval_batch(**batch))
    return model.eval_batch(**batch).item()


@pytest.mark.parametrize("layout", [dict(cp=2), dict(tp=2, **ULYSSES)], ids=cp_name)
def test_a_model_saved_under_cp_loads_in_any_layout(ranks, tmp_path, layout):
    shards, merged = tmp_path / "shards", tmp_path / "merged"
    losses = ranks(saved_parallelized, world(layout), layout, shards, merged)
    tp = layout.get("tp", 1)
    assert {path.name for path in shards.glob("*.safetensors")} == {
        f"model_tp_{rank}_pp_0.safetensors" for rank in range(tp)
    }
    assert (merged / "model.safetensors").exists()
    for directory in (shards, merged):
        for after in ({}, dict(dp=2, cp=2), dict(pp=2, cp=2)):
            for loss in ranks(loss_of_loaded, world(after), after, directory):
                assert loss == pytest.approx(losses[0], rel=1e-5)
