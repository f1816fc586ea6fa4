"""Forged and damaged files, and flags of all kinds: refused in one line, or what they mean; never a
traceback, another number, or a case that does not end.

Each case has a number, from which it follows: `python -m tests.files.test_fuzz manifest 137`
runs one case here and shows where it fails.
"""

import os
import random
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.fuzz.cases import findings, run_case
from tests.support.fuzz.checkpoints import Manifest, Trainer
from tests.support.fuzz.distributed import Distributed
from tests.support.fuzz.files import Configs, Headers, Jsonl
from tests.support.fuzz.settings import Flags, Toml
from tests.support.sampling import marked_slow

KINDS = {
    "manifest": Manifest,
    "trainer": Trainer,
    "flags": Flags,
    "toml": Toml,
    "jsonl": Jsonl,
    "configs": Configs,
    "headers": Headers,
    "distributed": Distributed,
}
CASES, PART = 500, 100
SAMPLES = {"manifest": 50, "trainer": 14}  # how many cases `make test` runs; 20 of other kinds
PARTS = ["a sample", *range(0, CASES, PART)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Makes the kinds that are asked for, once each."""
    made = {}

    def prepare(kind: str):
        if kind not in made:
            made[kind] = KINDS[kind](tmp_path_factory.mktemp(kind))
        return made[kind]

    return prepare


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "part"),
    marked_slow([(kind, part) for part in PARTS for kind in KINDS], lambda n, _: n >= len(KINDS)),
)
def test_cases_of_each_kind(kind, part, prepared, tmp_path):
    if part == "a sample":
        numbers = sorted(random.Random(kind).sample(range(CASES), SAMPLES.get(kind, 20)))
    else:
        numbers = list(range(part, part + PART))
    assert findings(kind, prepared(kind), numbers, tmp_path) == []


if __name__ == "__main__":
    here = Path(tempfile.mkdtemp())
    name, *numbers = sys.argv[1:]
    (here / "base").mkdir()
    case = KINDS[name](here / "base")
    for number in map(int, numbers):
        run_case(name, case, number, here)
    os.chdir("/")
