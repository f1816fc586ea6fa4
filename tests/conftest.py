import os

# several tests run side by side: threads would wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from megazoo.testing import RankPool
from megazoo.testing.ranks import PRELOADED

# Modules that tests import and that take seconds to load: the server of ranks loads them once.
PRELOADED += ["pytest", "pretrain_gpt"]
PRELOADED += [
    f"transformers.models.{name}.modeling_{name}" for name in ("auto", "gpt2", "llama", "mpt")
]


@pytest.fixture(scope="session")
def ranks():
    """Runs a function on a number of ranks: ranks(function, world_size, *args)."""
    pool = RankPool()
    yield pool.run
    pool.close()


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
