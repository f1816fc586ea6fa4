"""How a CPU multiplies follows from its flags, is the same on all ranks, and changes no result."""

import os
from itertools import product

import pytest
import torch

import megazoo
from megazoo.evaluation.scoring import score
from megazoo.layers.grouped import grouped_linear
from megazoo.layers.matmul import linear
from megazoo.layers.product import grouped_linear_formula
from megazoo.models.mixtral import MixtralConfig
from megazoo.parallel.cpu import products
from megazoo.parallel.cpu.products import (
    FEW_ROWS,
    FEWEST_WEIGHTS,
    Methods,
    linear_by_blocks,
    linear_for,
)
from tests.support.sampling import marked_slow
from tests.support.training import MODELS, TINY, context, make_batch, train

OTHER = Methods(widened=True, by_onednn=True)
ALL_BY_ONEDNN = Methods(widened=False, by_onednn=True, all_by_onednn=True)


X86 = "processor : {}\nflags\t\t: fpu avx2 avx512f {}\n\n"
ARM = "processor : {}\nFeatures\t: fp asimd {}\n\n"


@pytest.mark.parametrize(
    ("text", "has"),
    [
        (X86.format(0, "") + X86.format(1, ""), False),
        (X86.format(0, "avx512_bf16") + X86.format(1, "avx512_bf16 amx_bf16"), True),
        (X86.format(0, "avx512_bf16") + X86.format(1, ""), False),  # of different cores
        (ARM.format(0, "bf16"), True),
        (ARM.format(0, "i8mm"), False),
        ("", False),
        (None, False),  # another operating system
    ],
)
def test_the_instructions_of_the_cpu_choose_the_dtype(text, has, tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(products, "CPU_FILE", file)
    assert products._has_bfloat16.__wrapped__() == has
    monkeypatch.setattr(products, "_has_bfloat16", lambda: has)
    monkeypatch.setattr(products, "_agreed", None)
    assert products.methods().widened == (not has)


HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_blocks_of_a_weight_are_multiplied_in_fp32(block, dtype, monkeypatch):
    """The result is rounded once: it is the exact one to half a unit of the dtype."""
    monkeypatch.setattr(products, "BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 5, 48), (31, 48), (31,))
    )
    exact = x.double() @ weight.double().t()
    for found, expected in (
        (linear_by_blocks(x, weight), exact),
        (linear_by_blocks(x, weight, bias), exact + bias.double()),
    ):
        assert found.dtype == dtype
        half_a_unit = torch.finfo(dtype).eps / 2
        torch.testing.assert_close(found.double(), expected, rtol=1.01 * half_a_unit, atol=1e-5)


def test_blocks_are_for_several_rows_without_gradients(monkeypatch):
    for dtype, allowed in product(HALF, [(), *((each,) for each in HALF)]):
        weight = torch.zeros(FEWEST_WEIGHTS // 64, 64, dtype=dtype)
        x = torch.zeros(8, 1, 64, dtype=dtype)
        of_cpu = OTHER._replace(by_blocks=allowed)
        monkeypatch.setattr(products, "methods", lambda given=of_cpu: given)
        with torch.inference_mode():
            assert (linear_for(x, weight) is linear_by_blocks) == (dtype in allowed)
            for rows, matrix in ((x[1:], weight), (x, weight[1:]), (x.float(), weight.float())):
                assert linear_for(rows, matrix) is not linear_by_blocks
            with torch.autocast("cpu", torch.bfloat16):
                assert linear_for(x, weight) is not linear_by_blocks
        assert linear_for(x, weight) is not linear_by_blocks, "autograd needs F.linear"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_blocks_are_for_dtypes_that_the_cpu_does_not_multiply(machine, monkeypatch):
    monkeypatch.setattr(products, "_agreed", None)
    monkeypatch.setattr(products.platform, "machine", lambda: machine)
    uncached = products._reads_weights_per_row.__wrapped__
    monkeypatch.setattr(products, "_reads_weights_per_row", uncached)
    for has, of_onednn in product((False, True), ((), HALF[:1], HALF)):
        monkeypatch.setattr(products, "_has_bfloat16", lambda has=has: has)
        monkeypatch.setattr(
            products, "onednn_multiplies", lambda dtype, known=of_onednn: dtype in known
        )
        expected = tuple(dtype for dtype in HALF if dtype not in of_onednn)
        expected = expected[1:] if has and expected[:1] == HALF[:1] else expected
        assert products.methods().by_blocks == (expected if machine == "x86_64" else ())


def test_onednn_is_chosen_where_there_is_mkl(monkeypatch):
    monkeypatch.setattr(products, "_agreed", None)
    for mkl, onednn in product((False, True), repeat=2):
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda has=mkl: has)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda has=onednn: has)
        assert products.methods().by_onednn == (mkl and onednn)


VENDOR = "vendor_id\t: {}\nflags\t\t: fpu avx2 {}\n\n"


@pytest.mark.parametrize(
    ("text", "has"),
    [
        (VENDOR.format("AuthenticAMD", "avx512f") * 2, True),
        (VENDOR.format("AuthenticAMD", ""), False),
        (VENDOR.format("GenuineIntel", "avx512f"), False),
        ("vendor_id : IBM/S390\nfeatures : esan3\n", False),
        (ARM.format(0, "bf16"), False),
        ("", False),
    ],
)
def test_products_in_fp32_use_onednn_on_avx512_of_other_vendors(text, has, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(products, "CPU_FILE", tmp_path / "cpuinfo")
    assert products._has_avx512_of_another_vendor.__wrapped__() == has
    monkeypatch.setattr(products, "_has_avx512_of_another_vendor", lambda: has)
    monkeypatch.setattr(products, "_agreed", None)
    for mkl in (False, True):
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda has=mkl: has)
        assert products.methods().all_by_onednn == (has and mkl)


def followed(of_ranks):
    """What this rank uses when the CPU of rank 0 has bfloat16, or only those of the others."""
    first = os.environ["RANK"] == "0"
    products.follow(OTHER)  # what this process was told before
    usual, products._has_bfloat16 = products._has_bfloat16, lambda: of_ranks[0 if first else 1]
    try:
        context(dp=2)
        return products.methods().widened
    finally:
        products._has_bfloat16 = usual
        products.follow(None)


@pytest.mark.parametrize("has", [(True, False), (False, True)])
def test_all_ranks_follow_the_cpu_of_rank_0(ranks, has):
    assert ranks(followed, 2, has) == [not has[0]] * 2


@pytest.fixture
def calls(monkeypatch):
    """Where oneDNN is faster: the shapes of x that it was given."""
    shapes, multiply = [], products.linear_by_onednn

    def counted(x, weight, bias=None):
        shapes.append(tuple(x.shape))
        return multiply(x, weight, bias)

    monkeypatch.setattr(products, "linear_by_onednn", counted)
    monkeypatch.setattr(products, "methods", lambda: OTHER)
    return shapes


def test_a_few_rows_by_onednn_are_the_same_products(calls):
    torch.manual_seed(0)
    weight = torch.randn(2048, 257, dtype=torch.float64)
    for rows in ((1, 1), (3, 2), (FEW_ROWS, 1)):
        x = torch.randn(*rows, 257, dtype=torch.float64)
        for bias in (torch.randn(2048, dtype=torch.float64), None):
            with torch.inference_mode():
                y = linear(x.float(), weight.float(), None if bias is None else bias.float())
            assert calls.pop() == (*rows, 257)
            expected = torch.nn.functional.linear(x, weight, bias)
            torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
    assert not calls


def test_training_many_rows_and_small_matrices_are_multiplied_as_usual(calls):
    weight, small = torch.randn(1024, 256), torch.randn(1023, 256)
    assert small.numel() < FEWEST_WEIGHTS == weight.numel()
    x = torch.randn(FEW_ROWS + 1, 256)
    linear(x[:1], weight.clone().requires_grad_()).sum().backward()
    with torch.no_grad():  # as checkpointed layers run, whose backward computes the same again
        linear(x[:1], weight)
    with torch.inference_mode():
        linear(x, weight)
        linear(x[:1], small)
        linear(x[:1].double(), weight.double())
        linear(x[:1].bfloat16(), weight.bfloat16())
    assert not calls
    with torch.inference_mode():
        linear(x[:1], weight)
    assert len(calls) == 1


def gradients_of(compute, x, weight, *more):
    """Return the result of compute(x, weight, *more) and its gradients, for a seeded gradient."""
    leaves = [
        each.clone().requires_grad_() if each.is_floating_point() else each
        for each in (x, weight, *more)
    ]
    y = compute(*leaves)
    leaves = [each for each in leaves if each.requires_grad]
    seed = torch.Generator().manual_seed(1)
    gradient = torch.randn(y.shape, generator=seed, dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, gradient)]


@pytest.mark.parametrize("rows", [0, 1, 70])
def test_training_by_onednn_has_the_same_products_and_gradients(rows, calls, monkeypatch):
    monkeypatch.setattr(products, "methods", lambda: ALL_BY_ONEDNN)
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 3, 600).double(), torch.randn(450, 600).double()
    bias = torch.randn(450).double()
    for more in ((), (bias,)):  # also the gradient of a bias
        found = gradients_of(linear, x.float(), weight.float(), *(each.float() for each in more))
        assert len(calls) == 2, "the output, and the gradient of the input"
        calls.clear()
        expected = gradients_of(torch.nn.functional.linear, x, weight, *more)
        for ours, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=2e-4)


def test_training_experts_by_onednn_has_the_same_products_and_gradients(calls, monkeypatch):
    monkeypatch.setattr(products, "methods", lambda: ALL_BY_ONEDNN)
    torch.manual_seed(0)
    counts = torch.tensor([5, 0, 40])
    x, weight = torch.randn(45, 600).double(), torch.randn(3, 450, 600).double()
    found = gradients_of(grouped_linear, x.float(), weight.float(), counts)
    assert len(calls) == 2 * 2, "of the groups with rows"
    expected = gradients_of(grouped_linear_formula, x, weight, counts)
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=2e-4)


def test_second_gradients_and_single_rows_by_onednn(calls, monkeypatch):
    monkeypatch.setattr(products, "methods", lambda: ALL_BY_ONEDNN)
    torch.manual_seed(0)
    x, weight = torch.randn(600).double(), torch.randn(450, 600).double() / 25

    def second(compute, x, weight):
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        (first,) = torch.autograd.grad(compute(x, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, weight))

    found = second(linear, x.float(), weight.float())
    assert calls
    for ours, exact in zip(found, second(torch.nn.functional.linear, x, weight), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-3)


def test_autocast_and_experts_in_generation_do_not_use_onednn(calls, monkeypatch):
    x, stack, counts = torch.randn(3, 600), torch.randn(2, 448, 600), torch.tensor([3, 0])
    with torch.inference_mode():
        grouped_linear(x, stack, counts)
    monkeypatch.setattr(products, "methods", lambda: ALL_BY_ONEDNN)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, stack[0].clone().requires_grad_()).dtype == torch.bfloat16
    assert not calls
    with torch.inference_mode():  # only groups with rows
        y = grouped_linear(x, stack, counts)
        empty = grouped_linear(x[:0], stack, counts * 0)
    torch.testing.assert_close(y, x @ stack[0].t(), rtol=1e-4, atol=1e-3)
    assert empty.shape == (0, 448)
    assert calls == [(3, 600), (0, 600)]


def trained_by_onednn(name, layout):
    """The losses and gradient norms of some steps whose products all use oneDNN."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "methods", lambda: ALL_BY_ONEDNN)
        patch.setattr(products, "FEWEST_WEIGHTS", 1)
        return train(CONFIGS[name], layout, steps=4)


CONFIGS = {
    "llama": MODELS["llama"],
    "gpt2": MODELS["gpt2"],
    "mixtral": MixtralConfig(**TINY, kv_heads=2, ffn_size=48, experts=4),
}
LAYOUTS = [dict(tp=2), dict(tp=2, sp=True), dict(pp=2), dict(dp=2)]


@pytest.mark.parametrize(
    ("name", "layout"),
    marked_slow(list(product(CONFIGS, LAYOUTS)), lambda number, _: number not in (0, 1, 10)),
)
def test_layouts_that_multiply_by_onednn_have_the_usual_losses(ranks, name, layout):
    expected = train(CONFIGS[name], {}, steps=4)
    for found in ranks(trained_by_onednn, 2, name, layout):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=0)


def scored_by_blocks(layout, *by_blocks):
    """The log-likelihoods of a model in bfloat16, and whether a product used blocks."""
    calls, of_cpu = [], OTHER._replace(by_blocks=by_blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "methods", lambda: of_cpu)
        patch.setattr(products, "FEWEST_WEIGHTS", 1)
        patch.setattr(products, "BLOCK", 512)  # several blocks per weight
        patch.setattr(
            products, "linear_by_blocks", lambda *given: calls.append(1) or linear_by_blocks(*given)
        )
        model = megazoo.from_config(CONFIGS["llama"], context(**layout), seed=3, dtype="bf16")
        ids = make_batch(0)[0][:4]  # products of 128 tokens would be in fp32
        return score(model, ids, ids).log_likelihood, bool(calls)


def test_tp_by_blocks_has_the_usual_log_likelihoods(ranks):
    usual, used = scored_by_blocks({})
    assert not used
    of_ranks = ranks(scored_by_blocks, 2, dict(tp=2), torch.bfloat16)
    for found, used in [scored_by_blocks({}, torch.bfloat16), *of_ranks]:
        assert used
        torch.testing.assert_close(found, usual, rtol=0.01, atol=0)
