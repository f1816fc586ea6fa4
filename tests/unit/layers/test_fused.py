"""The memory-saving twins against the plain formulas of the layers: values and gradients."""

from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megazoo.layers import fused, fused_cross_entropy, matmul
from megazoo.layers.cross_entropy import _columns_of, summed_losses, token_losses
from megazoo.layers.loss_terms import LossTerms
from megazoo.layers.mlp import gated, gelu_tanh
from megazoo.layers.norm import rms_norm
from megazoo.layers.qkv import split_heads
from megazoo.layers.rotary import Rotary, rotate
from megazoo.layers.static_cache import stack_pair
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.cpu import products
from megazoo.parallel.deferred import WeightQueue
from megazoo.parallel.shard import Shard
from megazoo.torch_internals import shares_storage
from tests.support.numbers import DTYPES, assert_equal, numbers, results
from tests.support.training import context


def cos_and_sin(rows, dtype):
    """Of seven positions, those of all rows or other ones of each of two."""
    positions = torch.arange(7) if rows is None else torch.arange(14).view(2, 7)
    return Rotary(4, 10000.0, 16)(positions, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate(dtype):
    for rows in (None, 2):
        x, turn = numbers(2, 3, 7, 4, dtype=dtype), cos_and_sin(rows, dtype)
        plain = results(lambda x, turn=turn: rotate.__wrapped__(x, *turn), x)
        assert_equal(results(lambda x, turn=turn: fused.rotate(x, *turn), x), plain)
        assert torch.equal(rotate(x, *turn), fused.rotate(x, *turn))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ["not turned", None, 2])
def test_split_heads(rows, dtype, monkeypatch):
    monkeypatch.setattr("megazoo.layers.qkv.rotate", rotate.__wrapped__)
    qkv, parts = numbers(2, 7, 24, dtype=dtype), [16, 4, 4]
    rotary = None if rows == "not turned" else cos_and_sin(rows, dtype)
    plain = results(lambda qkv: split_heads.__wrapped__(qkv, parts, 4, rotary), qkv)
    ours = results(lambda qkv: fused.split_heads(qkv, parts, 4, rotary), qkv)
    assert [y.shape for y in ours[0]] == [(2, 4, 7, 4), (2, 1, 7, 4), (2, 1, 7, 4)]
    assert_equal(ours, plain, exact_values=rotary is None)
    if rotary is None:
        assert torch.equal(ours[1][0], plain[1][0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_without_gradients(dtype, monkeypatch):
    """As with gradients, bit for bit, and v is not copied; also with features that do not turn."""
    for rows, size in product((None, 2), (4, 8)):
        qkv, parts = numbers(2, 7, 6 * size, dtype=dtype), [4 * size, size, size]
        rotary = cos_and_sin(rows, dtype)
        expected = fused.split_heads(qkv, parts, size, rotary)
        with torch.no_grad():
            found = fused.split_heads(qkv, parts, size, rotary)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert shares_storage(found[2], qkv)
        assert not shares_storage(found[0], qkv)


def test_pairs_are_stacked_as_views_of_one_tensor():
    qkv = numbers(2, 1, 24)
    q, k, v = split_heads(qkv, [16, 4, 4], 4)
    for one, other, is_view in (
        (k, v, True),
        (q[:, :1], q[:, 1:2], True),
        (v, k, False),
        (k, k, False),
        (k, v.clone(), False),
        (k, split_heads(numbers(2, 1, 24, seed=1), [16, 4, 4], 4)[2], False),
        (k, qkv[:, None, :, 16:24:2], False),
    ):
        with torch.no_grad():
            pair = fused.stack_pair(one, other)
        assert torch.equal(pair, stack_pair.__wrapped__(one, other))
        assert shares_storage(pair, qkv) is is_view


def test_rms_norm():
    for dtype, weight_dtype in product(DTYPES, DTYPES):
        inputs = numbers(2, 7, 24, dtype=dtype), numbers(24, dtype=weight_dtype, seed=1)
        plain = results(lambda x, weight: rms_norm.__wrapped__(x, weight, 1e-6), *inputs)
        ours = results(lambda x, weight: fused.rms_norm(x, weight, 1e-6), *inputs)
        assert_equal(ours, plain, exact_values=True)


def test_the_rms_norm_of_cuda_differs_by_the_last_bit():
    """F.rms_norm, which CUDA has a kernel for, rounds once where the formula rounds twice."""
    inputs = numbers(200, 512, dtype=torch.bfloat16), 1 + numbers(512, seed=1).bfloat16() / 4
    plain = results(lambda x, weight: rms_norm.__wrapped__(x, weight, 1e-6), *inputs)
    theirs = results(lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6), *inputs)
    bits = [result[0][0].view(torch.int16).int() for result in (plain, theirs)]
    assert (bits[0] - bits[1]).abs().max() == 1
    exact = rms_norm.__wrapped__(*(x.double() for x in inputs), 1e-6)
    errors = [(result[0][0].double() - exact).abs().mean() for result in (plain, theirs)]
    assert errors[1] < errors[0]
    assert_equal(theirs, plain)


def test_gated():
    for activation, dtype in product([F.silu, gelu_tanh, torch.relu, lambda x: x], DTYPES):
        inner = numbers(2, 7, 24, dtype=dtype)
        plain = results(lambda inner, of=activation: gated.__wrapped__(inner, of), inner)
        ours = results(lambda inner, of=activation: fused.gated(inner, of), inner)
        assert_equal(ours, plain, exact_values=True)


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
def test_linear(deferred):
    for case in product([None, torch.tanh], [True, False], DTYPES):
        check_linear(deferred, *case)


def check_linear(deferred, recompute, bias, dtype):
    inputs = [numbers(2, 7, 24, dtype=dtype), numbers(16, 24, dtype=dtype, seed=1)]
    inputs += [numbers(16, dtype=dtype, seed=2)] if bias else []
    queue = WeightQueue(lambda weight: None) if deferred else None
    weights = []

    def plain(x, weight, bias=None):
        return F.linear(recompute(x) if recompute else x, weight, bias)

    def ours(x, weight, bias=None):
        weight.grad_dtype = None  # as parameters of a model have it: gradients are fp32
        weights.append(weight)
        return matmul.linear(x, weight, bias, recompute=recompute, queue=queue)

    values, gradients = results(ours, *inputs)
    if deferred:
        assert gradients[1] is None
        queue.take()()
        gradients[1] = weights[0].grad.to(dtype)
    assert_equal((values, gradients), results(plain, *inputs), exact_values=True)


def test_linear_of_bfloat16_widened_on_cpus(monkeypatch):
    """The sums are fp32 then, and rounded once: nearer to the truth than the plain formula."""
    monkeypatch.setattr(products, "methods", lambda: products.Methods(True, False))
    inputs = [numbers(2, 64, 24), numbers(16, 24, seed=1), numbers(16, seed=2)]
    inputs = [x.bfloat16() for x in inputs]
    assert products.product_dtype(inputs[0]) == torch.float32
    exact = results(F.linear, *(x.float() for x in inputs))
    values, gradients = results(matmul.linear, *inputs)
    rounded = [y.bfloat16() for y in exact[0]], [x.bfloat16() for x in exact[1]]
    assert_equal((values, gradients), rounded, tolerance={torch.bfloat16: 2**-8})


def test_a_recomputed_linear_draws_as_it_drew_before():
    torch.manual_seed(0)
    x, weight = numbers(2, 7, 24), numbers(16, 24, seed=1)
    masks = []

    def dropped(x):
        masks.append(torch.rand_like(x) > 0.5)
        return x * masks[-1]

    results(partial(matmul.linear, recompute=dropped), x, weight)
    assert len(masks) == 2
    assert torch.equal(*masks)


def losses_of(function, logits, targets, tp, terms):
    """A function's results for this rank's columns of the logits."""
    ctx = context(tp=tp)
    (cut,) = Shard(1, (logits.shape[1],)).cuts(tp, ctx.tp_rank)
    mine = logits[:, cut.global_start : cut.global_start + cut.length]
    columns = _columns_of(targets, cut.global_start, cut.length)
    return results(lambda logits: function(logits, *columns, ctx, terms), mine)


TERMS = LossTerms(label_smoothing=0.1, z_loss=1e-2, vocab_size=37)


def compare_token_losses(all_logits, targets, tp, terms):
    found = []
    for logits in all_logits:
        plain = losses_of(token_losses.__wrapped__, logits, targets, tp, terms)
        whole = losses_of(fused_cross_entropy.token_losses, logits, targets, tp, terms)
        with mock.patch.dict(fused_cross_entropy.CHUNK_ELEMENTS, cpu=100):  # several chunks
            chunks = losses_of(fused_cross_entropy.token_losses, logits, targets, tp, terms)
        for ours in (whole, chunks):
            assert_equal(ours, plain)
        found.append(plain[0][0])
    return found


@pytest.mark.parametrize("terms", [LossTerms(), TERMS], ids=["plain", "terms"])
@pytest.mark.parametrize("tp", [1, 2])
def test_token_losses_in_chunks(ranks, tp, terms):
    all_logits = [5 * numbers(50, 37, dtype=dtype) for dtype in DTYPES]
    targets = torch.randint(0, 37, (50,), generator=torch.Generator().manual_seed(1))
    targets[::3] = -100
    for found in ranks(compare_token_losses, tp, all_logits, targets, tp, terms):
        for logits, losses in zip(all_logits, found, strict=True):
            logits = logits.float()
            expected = F.cross_entropy(
                logits, targets, reduction="none", label_smoothing=terms.label_smoothing
            )
            expected += terms.z_loss * logits.logsumexp(-1).square() * (targets != -100)
            torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("soft_cap", "terms"), [(None, LossTerms()), (5.0, TERMS)])
@pytest.mark.parametrize("rows", [7, 99], ids=["pieces", "one piece"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_summed_losses_in_pieces(dtype, rows, soft_cap, terms):
    x, weight = numbers(50, 8, dtype=dtype), numbers(37, 8, dtype=dtype, seed=1)
    targets = torch.arange(50) % 37
    targets[::3] = -100
    columns = _columns_of(targets, 0, 37)

    def loss(function, x, weight):
        factor = torch.tensor(1.0)
        total = function(x, weight, *columns, ParallelContext(), rows, factor, soft_cap, terms)
        total.backward()
        return total.detach(), x.grad, weight.grad

    twin, plain = (
        loss(function, x.clone().requires_grad_(), weight.clone().requires_grad_())
        for function in (fused_cross_entropy.summed_losses, summed_losses.__wrapped__)
    )
    assert_equal((twin[:1], twin[1:]), (plain[:1], plain[1:]))


@pytest.mark.parametrize(
    ("layer", "arguments"),
    [
        (rotate, (numbers(2, 3, 7, 4), *cos_and_sin(None, torch.float32))),
        (split_heads, (numbers(2, 7, 24), [16, 4, 4], 4)),
        (rms_norm, (numbers(7, 24), numbers(24), 1e-6)),
        (gated, (numbers(7, 24), torch.tanh)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_layers_run_the_twin_and_torch_compile_the_formula(layer, arguments, monkeypatch):
    def runs_a_twin():
        y = layer(arguments[0].clone().requires_grad_(), *arguments[1:])
        y = y[0] if isinstance(y, tuple) else y
        return hasattr(fused, type(y.grad_fn).__name__.removesuffix("Backward"))

    assert runs_a_twin()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not runs_a_twin()
