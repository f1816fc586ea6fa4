"""Contexts, collectives, shards, schedules and the pipeline: what the layers and models stand on."""

from megazoo.parallel.context import ParallelContext, current_context
from megazoo.parallel.module import ShardedModule
from megazoo.parallel.shard import ParameterSpec, Shard
from megazoo.parallel.stages import Stage

__all__ = ["ParallelContext", "ParameterSpec", "Shard", "ShardedModule", "Stage", "current_context"]
