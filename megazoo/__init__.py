"""megazoo: GPT-2, LLaMA and MPT from tensor-parallel layers, built stage by stage, the same in every layout."""

from megazoo import layers, optim
from megazoo.errors import UserError
from megazoo.models import from_config, register
from megazoo.parallel import ParallelContext

__all__ = ["ParallelContext", "UserError", "from_config", "layers", "optim", "register"]
__version__ = "0.1.0"
