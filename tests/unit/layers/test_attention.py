"""Attention whose queries and keys are normalised: cut over ranks, recomputed, and from a cache."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

import megazoo
from megazoo.errors import UserError
from megazoo.layers import (
    CausalSelfAttention,
    HeadwiseLayerNorm,
    KVCache,
    LayerNorm,
    RMSNorm,
    Rotary,
    units_of_heads,
)
from megazoo.models import find_config
from megazoo.parallel import ParallelContext
from tests.support.layers import drawn_by_name, gradients_of
from tests.support.layouts import assembled
from tests.support.training import context, layout_name, run_in_layout

HEAD = 6  # features


def norms_of_each_head():
    return {"q_norm": RMSNorm(HEAD, parallel=True), "k_norm": LayerNorm(HEAD, parallel=True)}


def norms_of_all_heads(kv_heads):
    query_unit, kv_unit, _ = units_of_heads(4, kv_heads, HEAD)
    return {
        "q_norm": HeadwiseLayerNorm(4 * HEAD, query_unit),
        "k_norm": HeadwiseLayerNorm(kv_heads * HEAD, kv_unit, bias=False),
    }


ATTENTIONS = {
    "each head": lambda: CausalSelfAttention(24, 4, 2, **norms_of_each_head()),
    "each head, one KV head": lambda: CausalSelfAttention(24, 4, 1, **norms_of_each_head()),
    "queries alone": lambda: CausalSelfAttention(24, 4, q_norm=RMSNorm(HEAD, parallel=True)),
    "all heads": lambda: CausalSelfAttention(24, 4, 2, **norms_of_all_heads(2)),
    "all heads, one KV head": lambda: CausalSelfAttention(24, 4, 1, **norms_of_all_heads(1)),
}


def built(name, ctx):
    """The attention, with values that depend on the parameters' names alone."""
    with ctx:
        return drawn_by_name(ATTENTIONS[name](), lambda spec: spec.std * 20 or 0.3)


def turned(layer, x, tokens=None, first=0, cache=None):
    """The attention's output, with rotary positions from the first. tokens: of the sequence."""
    positions = torch.arange(first, first + (tokens or x.shape[1]))
    rotary = Rotary(HEAD, 10000.0, 16)(positions, x.dtype)
    return layer(x, rotary=rotary, cache=cache)


def differentiated(name, x, layout, recompute=False):
    """The output, and the gradients of x and of the parameters; of x and of the output this rank's
    part of the sequence."""
    ctx = context(**layout)
    layer = built(name, ctx)
    layer.recompute = recompute
    cut = (lambda x: x.chunk(ctx.tp_size, 1)[ctx.tp_rank]) if ctx.sequence_parallel else lambda x: x
    given = torch.arange(1.0, x.numel() + 1).view_as(x).cos()
    x = cut(x).clone().requires_grad_()
    y = turned(layer, x, tokens=8)
    (y.sin() * cut(given)).sum().backward()
    return y.detach(), x.grad, gradients_of(layer, ctx)


def all_differentiated(x, layout):
    return [differentiated(*case[:1], x, layout, *case[1:]) for case in CASES]


CASES = list(product(ATTENTIONS, [False, True]))  # recomputed, too


@pytest.mark.parametrize("layout", [dict(tp=2), dict(tp=2, sp=True), dict(tp=4)], ids=layout_name)
def test_normalised_heads_cut_over_ranks_equal_one_process(ranks, layout):
    x = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(1))
    found = zip(*ranks(all_differentiated, layout["tp"], x, layout), strict=True)
    for (name, _), parts in zip(CASES, found, strict=True):
        check_parts(parts, differentiated(name, x, {}), layout, name)


def check_parts(parts, expected, layout, name):
    y, x_grad, gradients = expected
    close = partial(
        torch.testing.assert_close, atol=1e-5, rtol=1e-5, msg=lambda why: f"{name}: {why}"
    )
    if layout.get("sp"):
        close(torch.cat([part[0] for part in parts], dim=1), y)
        close(torch.cat([part[1] for part in parts], dim=1), x_grad)
    else:
        for part in parts:
            close(part[0], y)
            close(part[1], x_grad)
    whole = assembled([gradients])
    for _, _, own in parts:  # what several ranks hold has the whole gradient on each
        for key, (_, pieces) in own.items():
            for piece, gradient in pieces:
                close(gradient, whole[key][tuple(slice(*bounds) for bounds in piece.box)])


def all_cached_and_whole(x, layout):
    return {name: cached_and_whole(name, x, layout) for name in ATTENTIONS}


def cached_and_whole(name, x, layout):
    layer = built(name, context(**layout)).eval()
    cache, outputs = KVCache(8), []
    with torch.no_grad():
        for part in (x[:, :4], *x[:, 4:].split(1, dim=1)):
            outputs.append(turned(layer, part, first=cache.used, cache=cache))
            cache.advance(part.shape[1])
        return torch.cat(outputs, dim=1), turned(layer, x)


@pytest.mark.parametrize("layout", [dict(), dict(tp=2)], ids=layout_name)
def test_a_cache_keeps_normalised_keys(ranks, layout):
    x = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(1))
    for found in run_in_layout(ranks, all_cached_and_whole, layout, x):
        for name, (cached, whole) in found.items():
            assert torch.allclose(cached, whole, atol=1e-5, rtol=1e-5), name


def test_a_norm_whose_gradient_would_stay_a_part_is_refused():
    attention = partial(CausalSelfAttention, 24, 4, head_size=HEAD)
    for name in ("q_norm", "k_norm"):
        with ParallelContext.virtual(tp=2):
            with pytest.raises(
                UserError, match="q_norm and k_norm must be created with parallel=True"
            ):
                attention(**{name: RMSNorm(HEAD)})
            attention(**{name: RMSNorm(HEAD, parallel=True)})
        attention(**{name: RMSNorm(HEAD)})


def test_norms_of_each_head_are_what_they_say():
    x = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(1))
    layer = built("each head", context())
    given = {}
    for name in ("q_norm", "k_norm"):
        layer.get_submodule(name).register_forward_pre_hook(
            lambda _, arguments, name=name: given.update({name: arguments[0].shape})
        )
    q, k, v = layer.qkv(x)
    heads = layer.q_norm(q), layer.k_norm(k), v
    y = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(layer(x), layer.output(y.transpose(1, 2).flatten(2)))
    assert given == {"q_norm": (2, 8, 4, HEAD), "k_norm": (2, 8, 2, HEAD)}


def test_norms_keep_the_names_that_checkpoints_have():
    names = {name for name, _ in ATTENTIONS["all heads"]().named_parameters()}
    assert {"q_norm.weight", "q_norm.bias", "k_norm.weight"} <= names
    assert not any("norm" in name for name, _ in CausalSelfAttention(24, 4).named_parameters())


def test_norms_of_each_head_do_not_decay():
    config = replace(find_config("stablelm-tiny"), layers=1, head_norms=True)
    model = megazoo.from_config(config)
    decayed, others = (
        set(group["names"]) for group in megazoo.optim.AdamW(model, lr=1e-3).param_groups
    )
    norms = {name for name, _ in model.named_parameters() if "norm" in name}
    assert sorted(model.get_parameter(name).dim() for name in norms)[-2:] == [2, 2]
    assert norms <= others - decayed
