"""Adapters train as PEFT, transformers and torch's AdamW train them, from the same values."""

from itertools import product

import pytest

from tests.support.lora_peft import MODELS, WHAT, assert_as_in_peft, by_peft, by_us
from tests.support.sampling import marked_slow
from tests.support.training import layout_name, run_in_layout

LAYOUTS = [{}, dict(tp=2), dict(tp=2, sp=True), dict(tp=4), dict(pp=2)]
# Fast: some models, each with one kind of adapters, in one process.
FAST = [("llama", "q and v", {}), ("gpt2", "all", {}), ("mpt", "rslora", {})]


@pytest.mark.parametrize(
    ("name", "what", "layout"),
    marked_slow(
        list(product(MODELS, WHAT, LAYOUTS)),
        lambda _, case: case not in FAST,
        name=lambda case: f"{case[0]}-{case[1]}-{layout_name(case[2])}",
    ),
)
def test_adapters_train_as_in_peft(ranks, tmp_path, name, what, layout):
    expected, first, last = by_peft(name, what, tmp_path)
    assert all((last[n] - value).abs().max() > 1e-3 for n, value in first.items())
    assert_as_in_peft(run_in_layout(ranks, by_us, layout, tmp_path, what, first), expected, last)
