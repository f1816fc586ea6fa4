"""megazoo: GPT-2, LLaMA and MPT from tensor-parallel layers, built stage by stage, the same in every layout."""

from megazoo import layers, optim
from megazoo.checkpoint import from_pretrained
from megazoo.errors import UserError
from megazoo.models import from_config, register
from megazoo.parallel import ParallelContext

from_parallelized = from_pretrained  # the same code reads both

__all__ = [
    "ParallelContext",
    "UserError",
    "from_config",
    "from_parallelized",
    "from_pretrained",
    "layers",
    "optim",
    "register",
]
__version__ = "0.1.0"
