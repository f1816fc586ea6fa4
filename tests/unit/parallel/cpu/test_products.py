"""How a CPU multiplies follows from its flags, is the same on all ranks, and changes no result."""

import os
from itertools import product

import pytest
import torch

from megazoo.layers.matmul import linear
from megazoo.parallel.cpu import products
from megazoo.parallel.cpu.products import FEW_ROWS, FEWEST_WEIGHTS, Methods
from tests.support.training import context

OTHER = Methods(widened=True, by_onednn=True)


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


def test_onednn_is_chosen_where_there_is_mkl(monkeypatch):
    monkeypatch.setattr(products, "_agreed", None)
    for mkl, onednn in product((False, True), repeat=2):
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda has=mkl: has)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda has=onednn: has)
        assert products.methods().by_onednn == (mkl and onednn)


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

    def counted(x, weight, bias):
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
