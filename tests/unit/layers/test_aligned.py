"""Logits whose rows are aligned in memory, as on CUDA: here on a CPU that is told to need it."""

from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import pytest
import torch

from megazoo.layers import VocabParallelHead, aligned, matmul
from tests.support.layouts import case_name, one_process, short_pieces
from tests.support.sampling import marked_slow
from tests.support.training import (
    MODELS,
    context,
    train_and_keep_gradients,
    world,
    worst_gradient,
    worst_relative,
)

STEPS = 4


@contextmanager
def on_tensor_cores():
    """Within this block all CPU tensors need aligned rows, be they of 16 bits or not."""

    def needs_alignment(x, columns):
        return columns % 8 != 0

    with ExitStack() as stack:
        for module in ("aligned", "matmul"):
            patch = mock.patch(f"megazoo.layers.{module}.needs_alignment", needs_alignment)
            stack.enter_context(patch)
        yield


def train(*args, overlapped, in_pieces):
    hides = mock.patch.object(matmul, "hides_communication", return_value=overlapped)
    made = mock.patch.object(aligned, "empty_aligned", side_effect=aligned.empty_aligned)
    pieces = short_pieces() if in_pieces else nullcontext()
    with on_tensor_cores(), hides, made as count, pieces:
        return *train_and_keep_gradients(*args), count.call_count


CASES = [
    ("gpt2", dict(), ""), ("gpt2", dict(), "in pieces"), ("llama", dict(tp=2, sp=True), "beside"),
    # slow
    ("mpt, learned positions", dict(tp=2), "beside, in pieces"), ("llama", dict(tp=2), ""),
]  # fmt: skip
IN_LAYOUTS = marked_slow(
    CASES, lambda number, _: number > 2, name=lambda case: "-".join(map(case_name, case))
)


@pytest.mark.parametrize(("model", "layout", "how"), IN_LAYOUTS)
def test_gradients_are_those_of_one_process(ranks, model, layout, how):
    history, gradients = one_process(MODELS[model])
    options = {"overlapped": "beside" in how, "in_pieces": "in pieces" in how}
    results = ranks(train, world(layout), MODELS[model], layout, STEPS, **options)
    assert worst_relative(results[-1][0], history) < 1e-5
    for step, expected in enumerate(gradients):
        distance, name = worst_gradient([result[1][step] for result in results], expected)
        assert distance < 1e-5, f"{name} at step {step + 1}"
    assert all(result[2] for result in results)


def test_rows_of_logits_and_of_their_gradients_begin_at_multiples_of_64():
    head, x = VocabParallelHead(61, 8, ctx=context()), torch.randn(2, 5, 8)
    with on_tensor_cores():
        logits = head(x)
        assert (logits.shape, logits.stride()) == ((2, 5, 61), (320, 64, 1))
        assert aligned.aligned(torch.randn(7, 61)).stride() == (64, 1)
        assert aligned.aligned(torch.randn(7, 70)).stride() == (128, 1)
    torch.testing.assert_close(logits, head(x))
    assert head(x).is_contiguous()
