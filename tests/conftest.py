import pytest
import torch

from megazoo.testing import RankPool


@pytest.fixture(scope="session")
def ranks():
    """Runs a function on a number of ranks: ranks(function, world_size, *args)."""
    pool = RankPool()
    yield pool.run
    pool.close()


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
