"""Searches the seed of a twin in families.py: weights with which each choice of a token is clear.

$ python -m tests.support.seeds "stablelm, parallel, norms of heads"
"""

import sys
from unittest import mock

from tests.oracles.test_families import expected_tokens
from tests.support.families import REPEATS, TWINS, twin


def decides(name: str, seed: int) -> bool:
    """Whether with this seed no two candidates are all but equal, and each row has five different
    new tokens or more."""
    with mock.patch.dict(TWINS, {name: TWINS[name]._replace(seed=seed)}):
        twin.cache_clear()
        expected_tokens.cache_clear()
        return all(
            least > 1e-4 and all(row.unique().numel() > 4 for row in theirs[:, 9:])
            for theirs, least in expected_tokens(name)
        )


def main(names: list[str]) -> None:
    for name in names or TWINS.keys() - REPEATS:
        found = next((seed for seed in range(1, 300) if decides(name, seed)), "none below 300")
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
