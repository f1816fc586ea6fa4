"""Optimizers in a loop of a user's own: what is refused, torch's schedulers, settings of groups,
and checkpoints by torch.save."""

import copy
import pickle

import pytest
import torch

import megazoo
from megazoo.errors import UserError
from megazoo.optim.adamw import AdamW
from megazoo.optim.clip import clip_grad_norm
from tests.support.sampling import marked_slow
from tests.support.training import context, make_batch, replica_rows, run_in_layout, tiny_config


def test_an_optimizer_is_not_copied_and_others_go_on():
    model = megazoo.from_config(tiny_config())
    optimizer = AdamW(model)
    for act in (copy.deepcopy, pickle.dumps):
        with pytest.raises(
            UserError, match=r"AdamW can't be copied or pickled.* use state_dict\(\)"
        ):
            act(optimizer)
    ids, _ = make_batch(0)
    model.train_batch(ids, labels=ids)
    optimizer.step(None)
    with pytest.raises(UserError, match="AdamW does not support optimizer hooks"):
        optimizer.register_step_post_hook(lambda *_: None)
    assert "lr: 0.0003" in repr(optimizer)


def test_parameters_in_place_of_the_model_are_refused():
    model = megazoo.from_config("gpt2-tiny")
    with pytest.raises(UserError, match=r"not its parameters: AdamW\(model, lr=...\)"):
        AdamW(model.parameters())
    with pytest.raises(UserError, match=r"not its parameters: clip_grad_norm\(model, max_norm\)"):
        clip_grad_norm(model.parameters(), 1.0)
    with pytest.raises(UserError, match="pass a megazoo model, not a Linear"):
        AdamW(torch.nn.Linear(2, 2))


def test_torchs_adam_in_bfloat16_says_what_to_use():
    model = megazoo.from_config(tiny_config(), dtype=torch.bfloat16)
    ids, targets = make_batch(0)
    model.train_batch(ids, targets=targets)
    for kind in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax"):
        with pytest.raises(
            UserError,
            match=rf"torch's {kind} can't step torch.bfloat16 .* use megazoo\.optim\.AdamW",
        ):
            getattr(torch.optim, kind)(model.parameters()).step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(UserError, match="torch's fused SGD can't step"):
        torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()


def test_torchs_schedulers_set_the_learning_rate():
    ids, targets = make_batch(0)
    runs = []
    for scheduled in (True, False):
        model = megazoo.from_config(tiny_config(), seed=3)
        optimizer = AdamW(model, lr=1e-2)
        if scheduled:
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(3):
            model.train_batch(ids, targets=targets, step=step)
            if not scheduled:
                optimizer.lr = 1e-2 / (1 + step)
            optimizer.step()
            if scheduled:
                scheduler.step()
        runs.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    # looks for betas, too
    warm = torch.optim.lr_scheduler.OneCycleLR(AdamW(model), max_lr=1e-2, total_steps=10)
    assert warm.get_last_lr()[0] == pytest.approx(1e-2 / 25)


def test_a_groups_settings_hold():
    ids, targets = make_batch(0)
    model, other = (megazoo.from_config(tiny_config(), seed=3) for _ in range(2))
    optimizer, expected = AdamW(model), AdamW(other, weight_decay=0.5, eps=1e-3, betas=(0.5, 0.6))
    for group, decay in zip(optimizer.param_groups, (0.5, 0.0), strict=True):
        group.update(weight_decay=decay, eps=1e-3, betas=(0.5, 0.6))
    for each, opt in ((model, optimizer), (other, expected)):
        each.train_batch(ids, targets=targets)
        opt.step()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def own_checkpoint(path, dtype, zero, layout):
    """Four steps, of which two come after a checkpoint by torch.save; or four without: the
    parameters."""
    ctx = context(**layout)
    found = []
    for stops in (False, True):
        model = megazoo.from_config(tiny_config(), ctx, dtype=dtype, seed=3)
        optimizer = AdamW(model, lr=1e-2, zero=zero)
        for step in range(4):
            if stops and step == 2:
                file = path / f"{ctx.rank}.pt"
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                saved = torch.load(file)
                model = megazoo.from_config(tiny_config(), ctx, dtype=dtype, seed=4)
                model.load_state_dict(saved["model"])
                optimizer = AdamW(model, lr=0.5, zero=zero)
                optimizer.load_state_dict(saved["optimizer"])
                assert optimizer.lr == 1e-2
            ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
            model.train_batch(ids, targets=targets, step=step)
            optimizer.step()
        found.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("layout", "zero", "dtype"),
    marked_slow(
        [
            (layout, zero, dtype)
            for layout, zero in ((dict(), 0), (dict(dp=2), 1), (dict(pp=2), 0))
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ],
        lambda number, _: number not in (0, 5, 7),
    ),
    ids=str,
)
def test_state_dicts_make_a_checkpoint_of_ones_own(ranks, tmp_path, layout, zero, dtype):
    run_in_layout(ranks, own_checkpoint, layout, tmp_path, dtype, zero)


def test_the_state_of_another_model_is_refused():
    small = AdamW(megazoo.from_config(tiny_config(layers=2)))
    with pytest.raises(UserError, match=r"of another model or layout: layers\.2\..* differs"):
        AdamW(megazoo.from_config(tiny_config(layers=3))).load_state_dict(small.state_dict())
