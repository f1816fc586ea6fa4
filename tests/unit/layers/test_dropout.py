"""Dropout: what agrees, what differs, and that nothing but names decides it."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import megazoo
from megazoo.errors import UserError
from megazoo.layers import CausalSelfAttention, Dropout
from tests.support.training import context, make_batch, replica_rows, tiny_config


def record_masks(layout, step=1):
    """One step with dropout. Returns the masks outside the parallel regions, by site, and the seeds
    drawn inside."""
    ctx = context(**layout)
    model = megazoo.from_config(tiny_config(dropout=0.5), ctx, seed=3)
    outside, inside = {}, []

    def hook(site):
        return lambda module, inputs, output: outside.setdefault(site, []).append(
            (output == 0).detach()
        )

    for name, module in model.named_modules():
        if isinstance(module, Dropout) and not module.parallel:
            module.register_forward_hook(hook(name))
    attend = F.scaled_dot_product_attention

    def watched(*args, **kwargs):
        assert kwargs["dropout_p"] == 0.5
        inside.append(torch.default_generator.initial_seed())
        return attend(*args, **kwargs)

    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    with mock.patch.object(F, "scaled_dot_product_attention", watched):
        loss = model.train_batch(ids, targets=targets, num_microbatches=2, step=step)
    return outside, inside, loss


def equal_masks(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(x, y) for site in a for x, y in zip(a[site], b[site], strict=True)
    )


def test_tp_ranks_agree_outside_the_parallel_regions_and_differ_inside(ranks):
    (outside0, inside0, _), (outside1, inside1, _) = ranks(record_masks, 2, {"tp": 2})
    assert len(outside0) == 1 + 2 * 5
    assert equal_masks(outside0, outside1)
    assert len(inside0) == 5 * 2
    assert not set(inside0) & set(inside1)


def test_replicas_differ_everywhere(ranks):
    (outside0, inside0, _), (outside1, inside1, _) = ranks(record_masks, 2, {"dp": 2})
    assert all(
        not torch.equal(x, y)
        for site in outside0
        for x, y in zip(outside0[site], outside1[site], strict=True)
    )
    assert not set(inside0) & set(inside1)


def test_two_runs_of_one_layout_draw_the_same_masks(ranks):
    layout = {"tp": 2, "pp": 2}
    runs = [ranks(record_masks, 4, layout) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert equal_masks(first[0], second[0])
        assert first[1] == second[1]
        assert torch.equal(first[2], second[2])


def test_sites_microbatches_and_steps_draw_differently():
    outside, inside, _ = record_masks({})
    other_step, _, _ = record_masks({}, step=2)
    masks = [mask.flatten().tolist() for site in outside for mask in outside[site]]
    masks += [mask.flatten().tolist() for site in other_step for mask in other_step[site]]
    assert len({tuple(mask) for mask in masks}) == len(masks)
    assert len(set(inside)) == len(inside)


def draw_alone():
    """Layers of a user's own module, without sites or seeds; a plain one and a parallel one."""
    torch.manual_seed(0)
    with context(tp=2):
        plain, parallel = Dropout(0.5), Dropout(0.5, parallel=True)
        attention = CausalSelfAttention(8, 2, dropout=0.5)
    x, y = torch.ones(100), torch.randn(1, 16, 8)
    return plain(x), plain(x), parallel(x), attention(y).detach(), attention(y).detach()


def test_layers_alone_draw_from_torchs_generator(ranks):
    (a, b, inside0, attended, again), (a1, b1, inside1, attended1, _) = ranks(draw_alone, 2)
    assert torch.equal(a, a1)
    assert torch.equal(b, b1)
    assert not torch.equal(a, b)
    assert not torch.equal(inside0, inside1)
    assert torch.equal(attended, attended1)
    assert not torch.equal(attended, again)


def masks_of_a_rank(sp):
    layer = site(Dropout(0.5, ctx=context(tp=2, sp=sp)), "a")
    return layer(torch.ones(100), seed=1) == 0


@pytest.mark.parametrize("sp", [False, True])
def test_tp_ranks_differ_where_each_has_tokens_of_its_own(ranks, sp):
    first, second = ranks(masks_of_a_rank, 2, sp)
    assert torch.equal(first, second) == (not sp)


def test_a_seed_without_a_site_is_refused():
    with pytest.raises(UserError, match="needs a site"):
        Dropout(0.5)(torch.ones(3), seed=1)


def site(layer, name):
    layer.site = name
    return layer


def test_the_rate_is_met_and_evaluation_drops_nothing():
    layer, x = site(Dropout(0.3), "a"), torch.ones(1000, 100)
    y = layer(x, seed=1)
    assert abs((y == 0).float().mean() - 0.3) < 0.01
    assert torch.allclose(y[y != 0], torch.tensor(1 / 0.7))
    assert layer.eval()(x, seed=1) is x


def test_the_generator_of_others_is_left_alone():
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    site(Dropout(0.5), "a")(torch.ones(10), seed=1)
    assert torch.equal(torch.rand(3), expected)
