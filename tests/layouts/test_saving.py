"""Checkpoints know nothing of layouts, of context parallelism neither: their files are those of a
data-parallel run, and a run goes on from them in another layout, with the optimizer's state."""

import json
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from safetensors.torch import load_file

import megazoo
from megazoo.testing import Layout
from tests.support.context_parallel import batch_of, rows_of_replica
from tests.support.layouts import MODELS, batches_of, in_layout, model_in, trained
from tests.support.sampling import marked_slow
from tests.support.training import context, worst_relative

GPT2, LLAMA = replace(MODELS["gpt2"], layers=2), replace(MODELS["llama"], layers=4)


def losses_of(*what, **how) -> list:
    return trained(*what, **how)[0]


@pytest.mark.parametrize(
    ("before", "afters"),
    marked_slow(
        [
            ("cp2+zero", ["cp3+ulysses", "tp1"]),
            ("cp2dp2", ["tp2cp2+sp+zero"]),
            ("tp2pp2", ["cp2dp2+zero"]),
            ("cp2pp2+zero", ["dp2"]),
            ("cp2", ["cp3+ulysses+zero"]),
            ("cp2dp2+zero", ["tp2cp2+sp", "tp4"]),
            ("tp1", ["cp2dp2", "pp2v2"]),
            ("cp2pp2", ["dp2+zero"]),
        ],
        lambda number, _: number > 1,
        name=lambda case: f"{case[0]} to {' '.join(case[1])}",
    ),
)
def test_a_run_goes_on_in_another_layout(ranks, tmp_path, before, afters):
    """With the optimizer's state."""
    batches = batches_of("documents", 4)
    expected = losses_of(LLAMA, batches, {})

    def run(layout, *what, **how):
        zero = Layout.named(layout).zero
        return in_layout(ranks, losses_of, layout, LLAMA, *what, zero=zero, **how)[0]

    run(before, batches[:2], saved=tmp_path)
    for after in afters:
        history = run(after, batches, start=tmp_path)
        assert worst_relative(history, expected[2:]) < 1e-5, after


def save_under_zero(layout: dict, config, steps: int, directory):
    trained(config, batches_of("documents", steps), layout, count=4, zero=1, saved=directory)


def test_each_tensor_is_written_once_and_files_are_those_of_replicas(ranks, tmp_path):
    ranks(save_under_zero, 4, dict(dp=2, cp=2), GPT2, 2, tmp_path / "cp")
    ranks(save_under_zero, 4, dict(dp=4), GPT2, 2, tmp_path / "dp")
    with_cp, without = (tmp_path / kind / "step_00000002" for kind in ("cp", "dp"))
    names = {path.name for path in with_cp.iterdir()}
    assert names == {path.name for path in without.iterdir()}
    optimizers = {f"optimizer_tp_0_pp_0_dp_{replica}.safetensors" for replica in range(4)}
    assert optimizers < names
    manifest = json.loads((with_cp / "megazoo.json").read_text())
    assert manifest["layout"] == {"tp": 1, "pp": 1, "dp": 4}
    stored = Counter(tensor for path in with_cp.glob("*.safetensors") for tensor in load_file(path))
    assert set(stored.values()) == {1}


def saved_parallelized(directory, merged, layout: dict):
    model = model_in(GPT2, context(**layout))
    model.save_parallelized(directory)
    model.save_parallelized(merged, merge_checkpoints=True)
    return model.eval_batch(**batch_of(0)).item()


def loss_of_loaded(directory, layout: dict):
    ctx = context(**layout)
    model = megazoo.from_config(GPT2, ctx, seed=99).from_parallelized(directory)
    again = megazoo.from_pretrained(directory, ctx)
    batch = rows_of_replica(batch_of(0), ctx)
    assert torch.equal(model.eval_batch(**batch), again.eval_batch(**batch))
    return model.eval_batch(**batch).item()


@pytest.mark.parametrize(
    ("layout", "every"),
    marked_slow(
        [("tp2cp2+ulysses", False), ("tp2cp2+ulysses", True), ("cp2", True)],
        lambda _, case: case[1],
    ),
)
def test_a_model_saved_under_cp_loads_in_any_layout(ranks, tmp_path, layout, every):
    shards, merged = tmp_path / "shards", tmp_path / "merged"
    losses = in_layout(ranks, saved_parallelized, layout, shards, merged)
    assert {path.name for path in shards.glob("*.safetensors")} == {
        f"model_tp_{rank}_pp_0.safetensors" for rank in range(Layout.named(layout).tp)
    }
    assert (merged / "model.safetensors").exists()
    some = [(shards, "cp2dp2"), (shards, "tp1"), (merged, "cp2pp2")]
    for directory, after in (
        product((shards, merged), ("tp1", "cp2dp2", "cp2pp2")) if every else some
    ):
        for loss in in_layout(ranks, loss_of_loaded, after, directory):
            assert loss == pytest.approx(losses[0], rel=1e-5)
