"""Gradients of 16-bit weights that CUDA's products add up in fp32, here with products of widened
factors in their place: they are autograd's sums but for its rounding of each product to 16 bits,
in every layout."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import megazoo
from megazoo import torch_internals
from megazoo.layers import matmul
from megazoo.parallel import deferred
from megazoo.parallel.buckets import GradientBuckets, accumulate_in_fp32
from megazoo.parallel.cpu import products
from megazoo.parallel.deferred import AT_ONCE
from tests.support.sampling import marked_slow
from tests.support.training import (
    MODELS,
    context,
    make_batch,
    randomize,
    replica_rows,
    run_in_layout,
)

NOT_WIDENED = products.Methods(widened=False, by_onednn=False)


def product(total, a, b):
    wide = a.float() @ b.float()
    return wide if total is None else total.add_(wide)


@contextmanager
def products_in_fp32():
    """Within this block 16-bit products have fp32 results, as on CUDA; yields a list of as many
    numbers."""
    made = []

    def counted(total, a, b):
        made.append(1)
        return product(total, a, b)

    with (
        mock.patch.object(deferred, "multiplies_in_fp32", lambda x: x.element_size() == 2),
        mock.patch.object(deferred, "product_in_fp32", counted),
        mock.patch.object(products, "methods", return_value=NOT_WIDENED),
    ):
        yield made


@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_products_are_added_by_blocks(monkeypatch, block):
    monkeypatch.setattr(deferred, "BLOCK", block)
    a, b = torch.randn(21, 4).bfloat16(), torch.randn(4, 8).bfloat16()
    total = torch.randn(21, 8)
    expected = total + (a @ b).float()
    found = deferred.add_product(total, a, b)
    assert found is total
    assert torch.equal(found, expected)


def gradients(config, layout, dtype, train=".", schedule="1f1b", recompute=("none",), **how):
    """A batch's loss and gradients on this rank: under ZeRO, of what it has to step."""
    ctx = context(**layout)
    model = randomize(megazoo.from_config(config, ctx, dtype=dtype, seed=3))
    model.recompute(*recompute).train_only(train)
    entries = list(model.trained_entries())
    late = {e.parameter for e in entries if len(e.pp_ranks) > 1 or e.spec.has_partial_gradient(ctx)}
    # several of them, so that one may leave too early
    buckets = GradientBuckets([e.parameter for e in entries], ctx, 3000, late)
    model.engine.gradients.made = buckets
    optimizer = megazoo.optim.AdamW(model, **how)
    if optimizer.loss_scale:
        optimizer.loss_scale.value = 4096.0
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    loss = model.train_batch(ids, targets=targets, num_microbatches=4, schedule=schedule)
    found = {}
    for entry in entries:
        gradient = entry.parameter.grad
        assert gradient.dtype == torch.float32
        if buckets.sharded:
            first, last = buckets.range_of(entry.parameter, ctx.dp_rank)
            gradient = gradient.flatten()[first:last]
        found[entry.name] = gradient.clone()
    return loss.item(), found


def both_ways(config, dtype, how, layout):
    with mock.patch.object(products, "methods", return_value=NOT_WIDENED):
        plain = gradients(config, layout, dtype, **{**how, "schedule": "1f1b"})
    with products_in_fp32() as made:
        return plain, gradients(config, layout, dtype, **how), len(made)


CASES = [
    ("gpt2", {}, {}),
    ("gpt2", dict(dp=2), {}),
    ("gpt2", dict(dp=2), {"zero": 1}),
    ("gpt2", dict(pp=2), {}),
    ("gpt2", dict(pp=2), {"schedule": "zb-h1"}),
    ("llama, one KV head", dict(tp=2, sp=True), {"recompute": ("selective",)}),
    ("llama", dict(tp=2, pp=2), {"schedule": "zb-h1", "train": r"layers\.[2-4]\.|norm"}),
    ("mpt", dict(tp=2), {"recompute": ("full", 2)}),
    ("mpt", dict(dp=2), {"train": r"^(?!embedding)"}),
]
# Whole models, ZeRO-1, split backwards, partial gradients, recomputation; each dtype.
FAST = (0, 2, 4, 14, 16)
CASES = [(*case, dtype) for dtype in (torch.bfloat16, torch.float16) for case in CASES]


@pytest.mark.parametrize(
    ("model", "layout", "how", "dtype"),
    marked_slow(CASES, lambda number, _: number not in FAST),
    ids=str,
)
def test_gradients_are_autograds_but_for_its_rounding(ranks, model, layout, how, dtype):
    for plain, ours, made in run_in_layout(ranks, both_ways, layout, MODELS[model], dtype, how):
        (loss, expected), (our_loss, found) = plain, ours
        assert made >= 4
        assert our_loss == loss
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            if gradient.numel():
                largest = gradient.abs().max().item()
                torch.testing.assert_close(found[name], gradient, rtol=0, atol=largest * 2**-6)


def parameter(*shape, seed=1):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    weight = torch.nn.Parameter(values)
    accumulate_in_fp32(weight)
    return weight


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_a_gradient_is_the_sum_of_fp32_products_and_stays_where_it_is():
    weight, expected, places, told = parameter(16, 24), None, set(), []
    weight.register_post_accumulate_grad_hook(told.append)
    with products_in_fp32():
        for seed in range(3):
            x, grad = numbers(2, 7, 24, seed=seed), numbers(2, 7, 16, seed=10 + seed)
            matmul.linear(x, weight, queue=AT_ONCE).backward(grad)
            expected = product(expected, grad.flatten(0, 1).t(), x.flatten(0, 1))
            places.add(weight.grad.data_ptr())
    assert torch.equal(weight.grad, expected)
    assert len(places) == 1
    assert len(told) == 3


@pytest.mark.parametrize("uses", ["twice", "in an embedding"])
def test_a_weight_that_is_used_twice_gets_both_and_tells_it_once(uses):
    def output(queue):
        x = numbers(5, 24)
        if uses == "twice":
            x = matmul.linear(x, weight, queue=queue)
        else:
            x = x + F.embedding(torch.tensor([3, 1, 4, 1, 5]), weight)
        return matmul.linear(x, weight, queue=queue)

    found = {}
    for queue in (None, AT_ONCE):
        weight, told = parameter(24, 24), []
        weight.register_post_accumulate_grad_hook(told.append)
        with products_in_fp32() as made:
            for _ in range(2):
                output(queue).backward(numbers(5, 24, seed=2))
        assert len(told) == 2
        assert bool(made) == bool(queue)
        found[queue] = weight.grad
    largest = found[None].abs().max().item()
    torch.testing.assert_close(found[AT_ONCE], found[None], rtol=0, atol=largest * 2**-7)


def hooked():
    weight = parameter(16, 24)
    weight.register_hook(lambda gradient: gradient / 2)
    return weight


AUTOGRADS = {
    "no parameter": lambda: parameter(16, 24) * 1,
    "hooked": hooked,
    "16-bit gradients": lambda: torch.nn.Parameter(numbers(16, 24)),
}


@pytest.mark.parametrize("kind", AUTOGRADS)
def test_autograd_adds_up_what_more_is_to_be_done_with(kind):
    weights = [AUTOGRADS[kind](), AUTOGRADS[kind]()]
    with products_in_fp32() as made:
        for weight, queue in zip(weights, (None, AT_ONCE), strict=True):
            weight.retain_grad()
            for seed in range(2):
                y = matmul.linear(numbers(5, 24, seed=seed), weight, queue=queue)
                y.backward(numbers(5, 16, seed=2), retain_graph=True)
    assert not made
    assert torch.equal(weights[0].grad, weights[1].grad)


def test_the_compiler_sees_the_plain_product():
    weight = parameter(16, 24)
    with products_in_fp32(), mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        assert not AT_ONCE.serves(numbers(5, 24), weight)
    with products_in_fp32():
        assert AT_ONCE.serves(numbers(5, 24), weight)
        # as autocast would have it
        assert not AT_ONCE.serves(numbers(5, 24).float(), weight)
        assert not AT_ONCE.serves(numbers(5, 24), torch.nn.Parameter(weight.float()))
    assert not AT_ONCE.serves(numbers(5, 24), weight)  # on a CPU


def test_a_backward_of_your_own_after_a_batch_is_autograds():
    model = megazoo.from_config(MODELS["llama"], dtype=torch.bfloat16, seed=3)
    ids, targets = make_batch(0)
    weight = model.layers["0"].mlp.down.weight
    with products_in_fp32() as made:
        model.train_batch(ids, targets=targets)
        assert made
        made.clear()
        before = weight.grad
        (alone,) = torch.autograd.grad(model(ids, labels=ids).loss, weight)
        assert not made
    assert weight.grad is before
    assert not torch.equal(alone.float(), before)


def test_a_loop_of_your_own_adds_up_as_train_batch_does():
    ids, targets = make_batch(0)
    found = []
    for own in (False, True):
        model = megazoo.from_config(MODELS["llama"], dtype=torch.bfloat16, seed=3)
        with products_in_fp32() as made:
            if own:
                for out in model.microbatches(ids, targets=targets, num_microbatches=2):
                    out.loss.backward()
            else:
                model.train_batch(ids, targets=targets, num_microbatches=2)
        found.append([parameter.grad for parameter in model.parameters()])
        assert len(made) == 2 * sum(p.dim() > 1 for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("older", [False, True], ids=["adds in the product", "adds after it"])
def test_the_product_of_any_version_of_torch(monkeypatch, older):
    """torch's own products, which no CPU has, get what they are called with."""
    calls = []

    def mm(a, b, *, out_dtype):
        calls.append("mm")
        return (a.float() @ b.float()).to(out_dtype)

    def addmm(total, a, b, *, out_dtype, out):
        if older:
            raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16")
        calls.append("addmm")
        assert out is total
        assert out_dtype == total.dtype
        return product(total, a, b)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    torch_internals._adds_in_fp32.cache_clear()
    a, b = numbers(16, 5), numbers(5, 24, seed=1)
    total = torch_internals.product_in_fp32(None, a, b)
    assert torch.equal(total, product(None, a, b))
    calls.clear()
    assert torch_internals.product_in_fp32(total, a, b) is total
    assert torch.equal(total, 2 * product(None, a, b))
    assert calls == (["mm"] if older else ["addmm", "addmm"])  # the first was a try
    torch_internals._adds_in_fp32.cache_clear()


def test_torch_takes_these_products():
    a, b = numbers(16, 5).to("meta"), numbers(5, 24).to("meta")
    total = torch_internals.product_in_fp32(None, a, b)
    assert total.dtype == torch.float32
    assert torch_internals.product_in_fp32(total, a, b) is total
