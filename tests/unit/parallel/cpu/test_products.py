"""How a CPU multiplies is measured, followed by all ranks, and changes no result."""

import os
from itertools import cycle

import pytest
import torch

from megazoo.layers.matmul import linear
from megazoo.parallel.cpu import products
from megazoo.parallel.cpu.products import FEW_ROWS, FEWEST_WEIGHTS, Verdicts
from tests.support.training import context

USUAL, OTHER = Verdicts(widened=False, by_onednn=False), Verdicts(widened=True, by_onednn=True)


def test_the_faster_way_is_measured():
    for usual, other, is_faster in (
        ([3.0], [1.0], True),
        ([1.0], [3.0], False),
        ([1.1], [1.0], False),  # too near to be worth it
        ([3.0], [9.0, 9.0, 1.0, 9.0], True),  # other processes were busy
        ([9.0, 9.0, 1.0, 9.0], [3.0], False),
    ):
        with pytest.MonkeyPatch.context() as patch:
            assert measured(patch, usual, other) == (is_faster, is_faster), (usual, other)


def measured(patch, usual, other) -> Verdicts:
    """On a clock that only products move, each as long as the next of the seconds given."""
    clock, seconds = [0.0], {"usual": cycle(usual), "other": cycle(other)}
    # for each dtype of x: whether F.linear is then the other way
    is_other = {torch.bfloat16: False, torch.float32: True}

    def linear(x, weight):
        other = is_other[x.dtype] and len(x) > 1  # one row in fp32 is the usual way there
        clock[0] += next(seconds["other" if other else "usual"])
        return x

    def linear_by_onednn(x, weight, bias):
        clock[0] += next(seconds["other"])
        return x

    patch.setattr(products.F, "linear", linear)
    patch.setattr(products, "linear_by_onednn", linear_by_onednn)
    patch.setattr(products.time, "perf_counter", lambda: clock[0])
    return products._measured.__wrapped__()


def verdicts(measured):
    """What this rank says when rank 0 has measured one thing, and the others another."""
    first = os.environ["RANK"] == "0"
    products.follow(None)  # what this process was told before
    usual, products._measured = products._measured, lambda: measured[0 if first else 1]
    try:
        context(dp=2)
        return products.verdicts()
    finally:
        products._measured = usual
        products.follow(None)


@pytest.mark.parametrize("measured", [(USUAL, OTHER), (OTHER, USUAL)], ids=["usual", "other"])
def test_all_ranks_follow_the_measurement_of_rank_0(ranks, measured):
    assert ranks(verdicts, 2, measured) == [measured[0]] * 2


@pytest.fixture
def calls(monkeypatch):
    """Where oneDNN is faster: the shapes of x that it was given."""
    shapes, multiply = [], products.linear_by_onednn

    def counted(x, weight, bias):
        shapes.append(tuple(x.shape))
        return multiply(x, weight, bias)

    monkeypatch.setattr(products, "linear_by_onednn", counted)
    monkeypatch.setattr(products, "verdicts", lambda: OTHER)
    return shapes


def test_a_few_rows_by_onednn_are_the_same_products(calls):
    torch.manual_seed(0)
    weight = torch.randn(300, 257, dtype=torch.float64)
    for rows in ((1, 1), (3, 2), (FEW_ROWS, 1)):
        x = torch.randn(*rows, 257, dtype=torch.float64)
        for bias in (torch.randn(300, dtype=torch.float64), None):
            with torch.inference_mode():
                y = linear(x.float(), weight.float(), None if bias is None else bias.float())
            assert calls.pop() == (*rows, 257)
            expected = torch.nn.functional.linear(x, weight, bias)
            torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
    assert not calls


def test_training_many_rows_and_small_matrices_are_multiplied_as_usual(calls):
    weight, small = torch.randn(256, 256), torch.randn(255, 256)
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
