"""--rampup-batch-size: the sizes of Megatron-LM; a run resumes in another layout as if it had not
stopped."""

import re

import pytest

from megazoo import pretrain
from megazoo.errors import UserError
from megazoo.trainer.batch_sizes import BatchSizes
from tests.support.pretraining import SMALL, records

RAMP = "--global-batch-size 8 --micro-batch-size 1 --rampup-batch-size 2 2 8"
RUN = [*SMALL, "--data", "mock", "--layers", "1", *RAMP.split()]
ENDING = "--steps 5 --lr-decay-steps 5".split()


def megatrons(consumed: int, final: int, first: int, increment: int, samples: int) -> int:
    """The size in Megatron-LM: RampupBatchsizeNumMicroBatchesCalculator.update."""
    if consumed > samples:
        return final
    per_increment = samples / ((final - first) / increment)
    return min(first + int(consumed / per_increment) * increment, final)


def test_the_sizes_are_those_of_megatron():
    for final, ramp in ((8, (2, 2, 8)), (96, (16, 8, 3000)), (32, (32, 1, 7)), (64, (8, 56, 100))):
        for consumed in range(0, 2 * ramp[2], 7):
            if final > ramp[0]:
                expected = megatrons(consumed, final, *ramp)
                assert BatchSizes(final, ramp).at(consumed) == expected, (final, ramp, consumed)
    sizes = BatchSizes(8, (2, 2, 8))
    assert list(sizes.first(0, 5)) == [0, 2, 4, 8, 16]
    assert list(sizes.first(2, 2)) == [2, 4]
    assert list(sizes.first(16, 2)) == [16, 24]
    assert sizes.first(0, 10**12)[-1] == 8 * 10**12 - 24
    assert [sizes.steps_to(0, end) for end in (1, 2, 8, 9, 24)] == [1, 1, 3, 4, 5]
    assert list(BatchSizes(8).first(16, 2)) == [16, 24]
    assert [BatchSizes(8).steps_to(16, end) for end in (17, 24, 25)] == [1, 1, 2]


def test_a_run_with_a_ramp_resumes_in_another_layout(ranks, tmp_path):
    metrics, run = tmp_path / "whole", tmp_path / "run"
    pretrain.main([*RUN, *ENDING, "--metrics", str(metrics)])
    whole = [line for line in records(metrics) if "loss" in line]
    assert [line["consumed_samples"] for line in whole] == [2, 4, 8, 16, 24]
    assert [line["consumed_tokens"] for line in whole] == [32 * n for n in (2, 4, 8, 16, 24)]
    words = [*RUN, *ENDING, "--steps", "2", "--save", str(run)]
    ranks(pretrain.main, 2, [*words, "--dp", "2", "--zero", "1"])
    rest = ["--load", str(run), "--steps", "5", "--metrics", str(tmp_path / "rest"), "--tp", "2"]
    ranks(pretrain.main, 2, [*rest, "--device", "cpu"])
    resumed = [line for line in records(tmp_path / "rest") if "loss" in line]
    for line, expected in zip(resumed, whole[2:], strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["consumed_samples"] == expected["consumed_samples"]


def test_a_ramp_that_does_not_fit_is_refused():
    for words, line in {
        "3 2 8": "--rampup-batch-size 3 2 8 does not reach --global-batch-size 8",
        "10 2 8": "10 2 8 does not reach --global-batch-size 8",
        "2 2": "--rampup-batch-size 2 2 must be three numbers of at least 1: START INCREMENT",
        "2 2 0": "2 2 0 must be three numbers of at least 1",
        "2 2 8 --micro-batch-size 4": "START and INCREMENT must be multiples of micro-batch-size",
    }.items():
        with pytest.raises(UserError, match=re.escape(line)):
            pretrain.prepare([*RUN, "--steps", "2", "--rampup-batch-size", *words.split()])
