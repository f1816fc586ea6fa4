"""The seeded runs that changes of the core are compared with: the same numbers each time."""

import pytest

from tests.support.seeded_runs import RUNS, differences, record_all

FEW = ("gpt2", "llama tp2, float16")


@pytest.mark.parametrize("names", [FEW, pytest.param(tuple(RUNS), marks=pytest.mark.slow)])
def test_runs_repeat_bit_for_bit(names):
    runs = {name: RUNS[name] for name in names}
    first, second = record_all(runs), record_all(runs)
    assert differences(first, second) == []
    first[FEW[0]]["steps"][1][0] = "0x1.0p+0"
    del first[FEW[1]]
    assert differences(first, second) == [
        "gpt2: steps differ from number 1 on",
        "llama tp2, float16: only in one of the files",
    ]
