"""The options of this test suite: shards, and the table of seconds by folder."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.support import budget
from tests.support.sampling import in_shard, shard_of


def test_shards_are_disjoint_and_together_have_every_test():
    tests = list(range(29))
    shards = [in_shard(tests, text) for text in ("1/3", "2/3", "3/3")]
    assert sorted(test for shard, _ in shards for test in shard) == tests
    assert all(sorted(shard + others) == tests for shard, others in shards)
    assert [len(shard) for shard, _ in shards] == [10, 10, 9]


@pytest.mark.parametrize("text", ["0/8", "9/8", "3", "a/8", "3/", "1/0", "-1/2"])
def test_a_shard_has_a_number_and_a_count(text):
    with pytest.raises(pytest.UsageError, match="use a number and a count, such as 3/8"):
        shard_of(text)


def test_the_seconds_of_setup_call_and_teardown_count_for_a_folder():
    phases = [("setup", 1.0), ("call", 2.0), ("teardown", 0.5)]
    names = ["tests/unit/testing/test_a.py::test_b", "tests/unit/data/test_c.py::test_d"]
    reports = [
        SimpleNamespace(nodeid=name, when=when, duration=seconds)
        for name in names
        for when, seconds in phases
    ]
    seconds, tests = budget.by_folder([*reports, object()])
    assert seconds == {"tests/unit/testing": 3.5, budget.REST: 3.5}
    assert tests == {"tests/unit/testing": 1, budget.REST: 1}


def test_the_table_names_folders_over_their_budget_and_the_difference(tmp_path):
    path = tmp_path / "durations.json"
    budget.record(Counter({"tests/docs": 50.0}), Counter({"tests/docs": 4}), path)
    found = Counter({"tests/docs": budget.BUDGET["tests/docs"] + 7.0})
    lines = budget.table(found, Counter({"tests/docs": 4}), json.loads(path.read_text()))
    (docs,) = (line.split() for line in lines if line.startswith("tests/docs"))
    assert docs == ["tests/docs", "4", "97", "90", "50", "+47", "over", "by", "7"]
    assert len(lines) == 4, "the heading, the folder, the total, and the recorded run"
    few = budget.table(found, Counter({"tests/docs": 3}), json.loads(path.read_text()))
    assert "+47" not in few[1], "a selection is not compared"
    _, docs, total = budget.table(found, Counter({"tests/docs": 5}), None)
    assert docs.split() == ["tests/docs", "5", "97", "90", "over", "by", "7"]
    assert total.split() == ["total", "5", "97", "90", "over", "by", "7"]
