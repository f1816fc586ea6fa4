"""Where ranks stand and how they talk: the mesh, collectives, shards, schedules, gradient buckets.

Layers and models stand on this; it knows neither. Read first: context.py, shard.py, module.py.
"""

from megazoo.lazy import lazy_attributes

# What needs torch is imported when it is first used: the flags' help names the schedules without.
__getattr__ = lazy_attributes(
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
