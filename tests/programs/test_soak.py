"""A minute of tests/support/soak.py: random deaths, and the losses of a quiet run."""

import pytest

from tests.support.soak import soak


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_under_random_deaths_ends_as_a_quiet_one(tmp_path):
    figures = soak(tmp_path, minutes=1, seed=1)
    assert figures.steps > 5
    assert sum(figures.deaths.values()) >= 2
