"""Attention by products of blocks: its values and gradients against the plain formula in fp64, and
where it is used. The CPU needs no instructions for bfloat16."""

from contextlib import suppress
from itertools import product

import pytest
import torch
import torch.nn.functional as F

import megazoo
from megazoo.layers import Attend, attend, blocked_attention, segment_mask
from megazoo.layers.masks import additive, window_mask
from megazoo.layers.plain_attention import plain_attention
from megazoo.parallel.cpu import products
from megazoo.torch_internals import factors_are_bfloat16
from tests.support.training import context, tiny_config

CPU = torch.device("cpu")
UNIT = 2**-8  # of bfloat16
HERE = products.Methods(widened=False, by_onednn=False, attention=True)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def tensors(rows=3, heads=4, kv_heads=2, queries=40, keys=40, size=24) -> list[torch.Tensor]:
    """q, k and v as a layer has them: the heads of a token are together."""
    shapes = [(rows, queries, heads, size), *[(rows, keys, kv_heads, size)] * 2]
    given = [random(number, *shape)[-1].bfloat16() for number, shape in enumerate(shapes, 1)]
    return [x.transpose(1, 2).requires_grad_() for x in given]


def masks(queries: int, keys: int) -> dict[str, torch.Tensor | None]:
    segments = (torch.arange(keys) // 7).repeat(3, 1)
    segments[1, -30:] = -1
    hidden = segment_mask(segments, queries)
    bias = random(4, queries, keys).masked_fill(~window_mask(queries, keys, keys, CPU), -torch.inf)
    return {
        "causal": None,
        "window": window_mask(queries, keys, 9, CPU),
        "one for all queries": torch.ones(1, 1, 1, keys).bool(),
        "segments": hidden,
        "added": additive(hidden, torch.bfloat16),
        "of each head": bias.bfloat16(),
    }


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("elements", [1, 20_000, 1 << 19])  # one row, two rows, all rows
@pytest.mark.parametrize("name", masks(40, 40))
def test_values_and_gradients_are_those_of_the_formula(monkeypatch, name, block, elements):
    monkeypatch.setattr(blocked_attention, "BLOCK", block)
    monkeypatch.setattr(blocked_attention, "ELEMENTS", elements)
    keys = 40 if name == "causal" else 53
    given, mask = tensors(keys=keys), masks(40, keys)[name]
    y_grad = random(3, 4, 40, 24).bfloat16()
    y = blocked_attention.blocked_attention(*given, mask, 0.3)
    found = y, *torch.autograd.grad(y, given, y_grad)
    wide = [x.detach().double().requires_grad_() for x in given]
    y = plain_attention(*wide, mask, 0.0, 0.3)
    expected = y, *torch.autograd.grad(y, wide, y_grad.double())
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - exact).norm() < 1.5 * UNIT * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_a_mask_may_be_shared_expanded_and_used_again(dtype):
    given, mask = tensors(), window_mask(40, 40, 9, CPU)
    mask = mask if dtype == torch.bool else mask.log().to(dtype)  # 0 or -inf
    expanded, before = mask.expand(3, 1, 40, 40), mask.clone()
    y = blocked_attention.blocked_attention(*given, mask, None)
    y = y + blocked_attention.blocked_attention(*given, expanded, None)
    first = torch.autograd.grad(y.sum(), given, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(y.sum(), given)))
    assert torch.equal(mask, before)


def test_keys_that_a_block_does_not_see_are_not_multiplied(monkeypatch):
    monkeypatch.setattr(blocked_attention, "BLOCK", 16)
    q, k, _ = tensors()
    for mask, expected in (
        (None, [(0, 16), (0, 32), (0, 40)]),
        (window_mask(40, 40, 5, CPU), [(0, 16), (12, 32), (28, 40)]),
        (torch.zeros(1, 1, 1, 40), [(0, 40)] * 3),
    ):
        blocks = blocked_attention._Weights(q, k, mask, 1.0).blocks
        assert [(keys.start, keys.stop) for _, keys in blocks] == expected


def test_a_query_without_keys_is_finite_and_changes_no_other():
    given = tensors(rows=2, kv_heads=4)
    mask = window_mask(40, 40, 40, CPU).expand(2, 1, 40, 40).clone()
    mask[1, :, 5] = False
    for dtype in (torch.bool, torch.float32):
        added = (
            mask if dtype == torch.bool else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        )
        y = blocked_attention.blocked_attention(*given, added, None)
        assert y.isfinite().all()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum(), given))
        causal = blocked_attention.blocked_attention(*given, None, None)
        others = torch.arange(40) != 5
        torch.testing.assert_close(y[:, :, others], causal[:, :, others], rtol=UNIT, atol=UNIT)


def test_it_is_used_for_short_sequences_in_bfloat16(monkeypatch):
    monkeypatch.setattr(products, "methods", lambda: HERE)
    q, k, _ = tensors()
    takes = blocked_attention.takes_blocks
    assert takes(q, k, None, 0.0)
    assert takes(q, k[:, :, :33], torch.zeros(1, 1, 40, 33), 0.0)
    for case in (
        (q, k, None, 0.1),
        (q, k[:, :, :33], None, 0.0),
        (q[:, :, :31], k[:, :, :31], None, 0.0),
        (q[:0], k[:0], None, 0.0),
        (q, k.repeat(1, 1, 20, 1), torch.zeros(1, 1, 40, 800), 0.0),
        (q.repeat(1, 1, 20, 1), k, torch.zeros(1, 1, 800, 40), 0.0),
        (q, k, torch.zeros(1, 1, 40, 40, requires_grad=True), 0.0),
        (q.half(), k.half(), None, 0.0),
        (q.float(), k.float(), None, 0.0),
        (q.to("meta"), k.to("meta"), None, 0.0),
    ):
        assert not takes(*case)
    with torch.autocast("cpu", torch.bfloat16):
        assert not takes(q, k, None, 0.0)
    monkeypatch.setattr(products, "methods", lambda: HERE._replace(attention=False))
    assert not takes(q, k, None, 0.0)


def test_products_of_values_in_bfloat16_are_exact_in_fp32():
    a, b = random(3, 40, 24).bfloat16(), random(3, 24, 40).bfloat16()
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    with suppress(ZeroDivisionError), factors_are_bfloat16():
        assert matmul.fp32_precision == "bf16"
        found = a.float() @ b.float()
        raise ZeroDivisionError
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    assert matmul.fp32_precision == before


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_it_needs_instructions_for_bfloat16(machine, monkeypatch):
    monkeypatch.setattr(products, "_agreed", None)
    monkeypatch.setattr(products.platform, "machine", lambda: machine)
    monkeypatch.setattr(products, "_reads_weights_per_row", lambda _: False)
    for has, multiplies in product((False, True), repeat=2):
        monkeypatch.setattr(products, "_has_bfloat16", lambda has=has: has)
        monkeypatch.setattr(products, "onednn_multiplies", lambda _, here=multiplies: here)
        assert products.methods().attention == (has and multiplies and machine == "x86_64")


def losses(layout: dict, used: bool) -> tuple[float, int]:
    """The loss of a third step, and the calls of blocked_attention."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "methods", lambda: HERE._replace(attention=used))
        inner = attend.blocked_attention
        patch.setattr(attend, "blocked_attention", lambda *x: calls.append(1) or inner(*x))
        config = tiny_config(layers=2, max_positions=128)
        model = megazoo.from_config(config, context(**layout), seed=3, dtype=torch.bfloat16)
        optimizer = megazoo.optim.AdamW(model, lr=1e-2)
        ids = torch.randint(config.vocab_size, (2, 128), generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            loss = model.train_batch(ids, labels=ids)
            optimizer.step()
    return float(loss), len(calls)


def test_models_train_with_it_as_with_the_kernel(ranks):
    expected, without = losses({}, False)
    for layout in ({}, {"tp": 2}, {"cp": 2}):
        size = 2 if layout else 1
        for found, calls in ranks(losses, size, layout, True) if layout else [losses({}, True)]:
            assert calls > without == 0, layout
            assert found == pytest.approx(expected, rel=0.01), layout


def test_attend_gives_the_padded_values(monkeypatch):
    monkeypatch.setattr(products, "methods", lambda: HERE)
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    layer = Attend(4, 24, 2, value_size=16)
    q, k, v = tensors()
    y = layer(q, k, v[..., :16])
    expected = plain_attention(q, k, v[..., :16], None, 0.0, 24**-0.5).transpose(1, 2).flatten(2)
    torch.testing.assert_close(y, expected, rtol=4 * UNIT, atol=4 * UNIT)
