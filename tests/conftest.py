import pytest
import torch

from megazoo.testing import RankPool

# Modules that tests import and that take seconds to load: the server of ranks loads them once.
PRELOADED = ["pytest", "pretrain_gpt"]
PRELOADED += [f"transformers.models.{name}.modeling_{name}" for name in ("auto", "gpt2", "llama", "mpt")]


@pytest.fixture(scope="session", autouse=True)
def rank_pool():
    """The pool that tests share; it also starts the server from which other pools fork their ranks."""
    pool = RankPool(PRELOADED)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks(rank_pool):
    """Runs a function on a number of ranks: ranks(function, world_size, *args)."""
    return rank_pool.run


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
