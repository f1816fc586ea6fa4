"""Contexts, collectives, shards, schedules and the pipeline: what the layers and models stand on."""

from megazoo.parallel.context import ParallelContext, Stage, current_context
from megazoo.parallel.shard import ParameterSpec, Shard, ShardedModule

__all__ = ["ParallelContext", "ParameterSpec", "Shard", "ShardedModule", "Stage", "current_context"]
