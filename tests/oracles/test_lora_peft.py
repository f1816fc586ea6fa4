"""Adapters train as PEFT, transformers and torch's AdamW train them, from the same values."""

import pytest

from tests.support.lora_peft import MODELS, WHAT, assert_as_in_peft, by_peft, by_us
from tests.support.training import layout_name, run_in_layout


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize(
    "layout",
    [
        {},
        pytest.param(dict(tp=2), marks=pytest.mark.slow),
        pytest.param(dict(tp=2, sp=True), marks=pytest.mark.slow),
        pytest.param(dict(tp=4), marks=pytest.mark.slow),
        pytest.param(dict(pp=2), marks=pytest.mark.slow),
    ],
    ids=layout_name,
)
def test_adapters_train_as_in_peft(ranks, tmp_path, name, what, layout):
    expected, first, last = by_peft(name, what, tmp_path)
    assert all((last[n] - value).abs().max() > 1e-3 for n, value in first.items())
    assert_as_in_peft(run_in_layout(ranks, by_us, layout, tmp_path, what, first), expected, last)
