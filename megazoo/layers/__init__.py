"""Parallel layers to build models from; they also work in custom modules.

Each layer uses the parallel context of the enclosing `with ctx:` block, or the one passed as
`ctx=`. Without a context it runs in a single process.

A layer, including a custom one, declares the properties that other parts of megazoo need: see
`Layer`.
"""

from megazoo.layers.alibi import ALiBi, alibi_bias, alibi_slopes
from megazoo.layers.attend import Attend
from megazoo.layers.attention import CausalSelfAttention
from megazoo.layers.auxiliary import attach_loss
from megazoo.layers.cache import KVCache
from megazoo.layers.classification import ClassificationHead
from megazoo.layers.cross_entropy import vocab_parallel_cross_entropy
from megazoo.layers.dropout import Dropout
from megazoo.layers.embedding import PositionEmbedding, VocabParallelEmbedding, VocabParallelHead
from megazoo.layers.experts import (
    ColumnParallelExperts,
    MixtureOfExperts,
    RowParallelExperts,
)
from megazoo.layers.layer import Layer
from megazoo.layers.linear import ColumnParallelLinear, RowParallelLinear, round_to_int8
from megazoo.layers.masks import MaskPerChunk, MaskPerWindow, Packed, segment_mask, window_mask
from megazoo.layers.mlp import MLP, GatedMLP, activation_named, gelu_tanh
from megazoo.layers.norm import HeadwiseLayerNorm, HeadwiseRMSNorm, LayerNorm, RMSNorm
from megazoo.layers.qkv import QKVParallelLinear, units_of_heads
from megazoo.layers.rotary import Rotary, rotate
from megazoo.layers.router import ReplicatedLinear, Router

__all__ = [
    "MLP",
    "ALiBi",
    "Attend",
    "CausalSelfAttention",
    "ClassificationHead",
    "ColumnParallelExperts",
    "ColumnParallelLinear",
    "Dropout",
    "GatedMLP",
    "HeadwiseLayerNorm",
    "HeadwiseRMSNorm",
    "KVCache",
    "Layer",
    "LayerNorm",
    "MaskPerChunk",
    "MaskPerWindow",
    "MixtureOfExperts",
    "Packed",
    "PositionEmbedding",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "Rotary",
    "Router",
    "RowParallelExperts",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "activation_named",
    "alibi_bias",
    "alibi_slopes",
    "attach_loss",
    "gelu_tanh",
    "rotate",
    "round_to_int8",
    "segment_mask",
    "units_of_heads",
    "vocab_parallel_cross_entropy",
    "window_mask",
]
