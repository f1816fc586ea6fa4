"""Where ranks stand and how they talk: the mesh, collectives, shards, schedules, gradient buckets.

Layers and models stand on this; it knows neither. Read first: context.py, shard.py, module.py.
"""

from megazoo.parallel.context import ParallelContext, current_context
from megazoo.parallel.module import ShardedModule
from megazoo.parallel.shard import ParameterSpec, Shard
from megazoo.parallel.stages import Stage

__all__ = ["ParallelContext", "ParameterSpec", "Shard", "ShardedModule", "Stage", "current_context"]
