"""Ranks and their communication: the mesh, collectives, shards, schedules, gradient buckets.

Layers and models are built on this package, which does not import them. Read first: context.py,
shard.py, module.py.
"""

from typing import TYPE_CHECKING

from megazoo.lazy import lazy_attributes

if TYPE_CHECKING:
    from megazoo.parallel.context import ParallelContext, current_context
    from megazoo.parallel.module import ShardedModule
    from megazoo.parallel.shard import ParameterSpec, Shard
    from megazoo.parallel.stages import Stage

# Modules that need torch are imported on first use, so that --help does not import torch.
__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "ParallelContext": "megazoo.parallel.context",
        "ParameterSpec": "megazoo.parallel.shard",
        "Shard": "megazoo.parallel.shard",
        "ShardedModule": "megazoo.parallel.module",
        "Stage": "megazoo.parallel.stages",
        "current_context": "megazoo.parallel.context",
    },
)

__all__ = ["ParallelContext", "ParameterSpec", "Shard", "ShardedModule", "Stage", "current_context"]
