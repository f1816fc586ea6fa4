"""Which cases of a large table run in `make test`: a sample drawn with a seed. `make test-all` runs
all of them."""

import functools
import itertools
import random
import subprocess
from pathlib import Path

import pytest


@functools.cache
def commit_seed() -> int:
    """A seed that each commit changes, and that is the same in all workers; 0 outside of git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--verify", "-q", "HEAD"]
    try:
        head = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:  # without git
        return 0
    return int(head or "0", 16)


def sampled(cases, fast: int, *, seed: int = 0, name=None) -> list:
    """Return all cases as parameters of a test, of which all but a drawn sample are slow.

    cases: tuples of arguments, or single arguments. fast: how many run in `make test`. name: gives
    the id of a case; by default pytest makes it.
    """
    cases = list(cases)
    kept = set(random.Random(seed).sample(range(len(cases)), min(fast, len(cases))))
    return marked_slow(cases, lambda number, _: number not in kept, name=name)


def sampled_pairs(*factors: list, possible=lambda *_: True, seed: int = 0, name=None) -> list:
    """As `sampled`, of all combinations: those of `pairs_covered` run in `make test`."""
    cases = [case for case in itertools.product(*factors) if possible(*case)]
    kept = list(map(repr, pairs_covered(*factors, possible=possible, seed=seed)))
    return marked_slow(cases, lambda _, case: repr(case) not in kept, name=name)


def marked_slow(cases: list, is_slow, *, name=None) -> list:
    """Return cases as parameters; is_slow(number, case) says which are slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name(case) if name else None,
            marks=pytest.mark.slow if is_slow(number, case) else (),
        )
        for number, case in enumerate(cases)
    ]


def pairs_covered(*factors: list, possible=lambda *_: True, seed: int = 0) -> list[tuple]:
    """A few of the possible combinations, one value of each factor: any two values that can meet do
    so in one.

    Most mistakes show wherever some two settings meet (Kuhn et al. 2004): these find them in
    minutes where all combinations would take hours. Chosen greedily, by the number of new pairs;
    the same for the same seed.
    """
    cases = [case for case in itertools.product(*factors) if possible(*case)]
    random.Random(seed).shuffle(cases)
    bits: dict = {}  # a bit for each pair of values
    pairs = []
    for case in cases:
        found = itertools.combinations(enumerate(map(repr, case)), 2)
        pairs.append(sum(1 << bits.setdefault(pair, len(bits)) for pair in found))
    chosen, missing = [], (1 << len(bits)) - 1
    while missing:
        counts = [(pair & missing).bit_count() for pair in pairs]
        best = counts.index(max(counts))
        missing &= ~pairs[best]
        chosen.append(cases[best])
    return chosen


def in_shard(tests: list, text: str) -> tuple[list, list]:
    """Return the tests of a shard, such as "3/8", and the other ones. Every eighth test is in the
    shard, so that each shard has some of every folder."""
    index, count = shard_of(text)
    others = [test for number, test in enumerate(tests) if number % count != index]
    return tests[index::count], others


def shard_of(text: str) -> tuple[int, int]:
    """Return the index from 0 and the number of shards of "3/8".

    Raises:
        pytest.UsageError: The text has another form.
    """
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise pytest.UsageError(f"--shard is {text!r}: use a number and a count, such as 3/8")
    return int(index) - 1, int(count)
