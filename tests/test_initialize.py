"""OSLO's way in: a configuration, and a loop over micro-batches that calls backward itself."""

import json

import pytest
import torch
from helpers import MODELS, context, layout_name, make_batch, randomize, replica_rows, run_in_layout

import megazoo
from megazoo.errors import UserError


def by_hand_and_at_once(config, layout, factor=1.0):
    """Losses and gradients of one batch: by a loop of one's own, and by train_batch."""
    ctx = context(**layout)
    model = randomize(megazoo.from_config(config, ctx, seed=3))
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    found = []
    for by_hand in (True, False):
        if by_hand:
            loss = 0.0
            for out in model.microbatches(ids, targets=targets, num_microbatches=4):
                loss += out.loss.item()
                (out.loss * factor).backward()
        else:
            loss = model.train_batch(ids, targets=targets, num_microbatches=4).item()
        found.append((loss, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}))
    return found


@pytest.mark.parametrize(
    "layout",
    [dict(), dict(pp=2), dict(tp=2, pp=2), dict(pp=2, v=2), dict(pp=2, dp=2), dict(tp=2, sp=True), dict(pp=4)],
    ids=layout_name,
)
def test_a_loop_of_ones_own_trains_as_train_batch_does(ranks, layout):
    for by_hand, at_once in run_in_layout(ranks, by_hand_and_at_once, layout, MODELS["gpt2"]):
        assert by_hand[0] == pytest.approx(at_once[0], rel=1e-6)
        assert by_hand[1].keys() == at_once[1].keys()
        assert all(torch.equal(gradient, at_once[1][name]) for name, gradient in by_hand[1].items())


def test_what_the_loss_is_multiplied_by_counts(ranks):
    for by_hand, at_once in ranks(by_hand_and_at_once, 2, MODELS["llama"], dict(pp=2), factor=0.25):
        for name, gradient in by_hand[1].items():
            torch.testing.assert_close(4 * gradient, at_once[1][name], atol=1e-8, rtol=1e-5)


def initialized(model, config):
    ctx = megazoo.initialize(model, config=config).ctx
    return ctx.tp_size, ctx.pp_size, ctx.dp_size, ctx.rank


def test_initialize_takes_a_configuration_or_a_json_file(ranks, tmp_path):
    config = {"model_parallelism": {"enable": True, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    saved = megazoo.initialize("gpt2-tiny")
    saved.save_parallelized(tmp_path / "saved")
    for model, how in (("llama", config), (tmp_path / "saved", tmp_path / "config.json")):
        for rank, found in enumerate(ranks(initialized, 4, model, how)):
            assert found == (2, 2, 1, rank)
    off = {"model_parallelism": {**config["model_parallelism"], "enable": False}}
    again = megazoo.initialize(tmp_path / "saved", config=off)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_paralelism": {}}, "the configuration has no 'model_paralelism'; did you mean model_parallelism"),
        ({"model_parallelism": {"tensor_size": 2}}, "model_parallelism has no 'tensor_size'"),
        ({"model_parallelism": 2}, "model_parallelism must be a dictionary, not 2"),
        ("nowhere.json", "nowhere.json: No such file or directory"),
    ],
)
def test_what_is_not_known_is_told(config, message):
    with pytest.raises(UserError, match=message):
        megazoo.initialize("gpt2", config=config)
