"""megazoo: GPT-2, LLaMA, MPT, Mistral, Qwen and Pythia with tensor, pipeline, context and data
parallelism. The models are the same in every parallel layout."""

from typing import TYPE_CHECKING

from megazoo.errors import UserError
from megazoo.lazy import lazy_attributes

if TYPE_CHECKING:
    from megazoo import checkpoint, data, evaluation, layers, lora, models, optim, testing, trainer
    from megazoo.callbacks import on_evaluation, on_save, on_step
    from megazoo.compat.oslo import initialize
    from megazoo.launching.functions import launch
    from megazoo.models import from_config, from_parallelized, from_pretrained, register
    from megazoo.parallel import ParallelContext

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "ParallelContext": "megazoo.parallel",
        "checkpoint": "megazoo.checkpoint",
        "data": "megazoo.data",
        "evaluation": "megazoo.evaluation",
        "from_config": "megazoo.models",
        "from_parallelized": "megazoo.models",
        "from_pretrained": "megazoo.models",
        "initialize": "megazoo.compat.oslo",
        "launch": "megazoo.launching.functions",
        "layers": "megazoo.layers",
        "lora": "megazoo.lora",
        "models": "megazoo.models",
        "on_evaluation": "megazoo.callbacks",
        "on_save": "megazoo.callbacks",
        "on_step": "megazoo.callbacks",
        "optim": "megazoo.optim",
        "register": "megazoo.models",
        "testing": "megazoo.testing",
        "trainer": "megazoo.trainer",
    },
)

__all__ = [
    "ParallelContext",
    "UserError",
    "checkpoint",
    "data",
    "evaluation",
    "from_config",
    "from_parallelized",
    "from_pretrained",
    "initialize",
    "launch",
    "layers",
    "lora",
    "models",
    "on_evaluation",
    "on_save",
    "on_step",
    "optim",
    "register",
    "testing",
    "trainer",
]
__version__ = "0.1.0"
