"""Parallel layers to build models from; they also work in custom modules.

Each layer uses the parallel context of the enclosing `with ctx:` block, or the one passed as
`ctx=`. Without a context it runs in a single process.

A layer, including a custom one, declares the properties that other parts of megazoo need: see
`Layer`.
"""

from typing import TYPE_CHECKING

from megazoo.lazy import lazy_attributes

if TYPE_CHECKING:
    from megazoo.layers.alibi import ALiBi, alibi_bias, alibi_slopes
    from megazoo.layers.attend import Attend
    from megazoo.layers.attention import CausalSelfAttention
    from megazoo.layers.auxiliary import attach_loss
    from megazoo.layers.cache import KVCache
    from megazoo.layers.classification import ClassificationHead
    from megazoo.layers.cross_entropy import vocab_parallel_cross_entropy
    from megazoo.layers.dropout import Dropout
    from megazoo.layers.embedding import (
        PositionEmbedding,
        VocabParallelEmbedding,
        VocabParallelHead,
    )
    from megazoo.layers.experts import (
        ColumnParallelExperts,
        MixtureOfExperts,
        RowParallelExperts,
    )
    from megazoo.layers.float8 import multiply_in_float8, round_to_float8
    from megazoo.layers.layer import Layer
    from megazoo.layers.linear import ColumnParallelLinear, RowParallelLinear, round_to_int8
    from megazoo.layers.masks import MaskPerChunk, MaskPerWindow, Packed, segment_mask, window_mask
    from megazoo.layers.mlp import MLP, GatedMLP, activation_named, gelu_tanh
    from megazoo.layers.norm import (
        HeadwiseLayerNorm,
        HeadwiseRMSNorm,
        LayerNorm,
        LayerNormPerHead,
        RMSNorm,
    )
    from megazoo.layers.packed_weights import pack_weights
    from megazoo.layers.qkv import QKVParallelLinear, units_of_heads
    from megazoo.layers.rotary import Rotary, rotate
    from megazoo.layers.router import ReplicatedLinear, Router

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "ALiBi": "megazoo.layers.alibi",
        "Attend": "megazoo.layers.attend",
        "CausalSelfAttention": "megazoo.layers.attention",
        "ClassificationHead": "megazoo.layers.classification",
        "ColumnParallelExperts": "megazoo.layers.experts",
        "ColumnParallelLinear": "megazoo.layers.linear",
        "Dropout": "megazoo.layers.dropout",
        "GatedMLP": "megazoo.layers.mlp",
        "HeadwiseLayerNorm": "megazoo.layers.norm",
        "HeadwiseRMSNorm": "megazoo.layers.norm",
        "KVCache": "megazoo.layers.cache",
        "Layer": "megazoo.layers.layer",
        "LayerNorm": "megazoo.layers.norm",
        "LayerNormPerHead": "megazoo.layers.norm",
        "MLP": "megazoo.layers.mlp",
        "MaskPerChunk": "megazoo.layers.masks",
        "MaskPerWindow": "megazoo.layers.masks",
        "MixtureOfExperts": "megazoo.layers.experts",
        "Packed": "megazoo.layers.masks",
        "PositionEmbedding": "megazoo.layers.embedding",
        "QKVParallelLinear": "megazoo.layers.qkv",
        "RMSNorm": "megazoo.layers.norm",
        "ReplicatedLinear": "megazoo.layers.router",
        "Rotary": "megazoo.layers.rotary",
        "Router": "megazoo.layers.router",
        "RowParallelExperts": "megazoo.layers.experts",
        "RowParallelLinear": "megazoo.layers.linear",
        "VocabParallelEmbedding": "megazoo.layers.embedding",
        "VocabParallelHead": "megazoo.layers.embedding",
        "activation_named": "megazoo.layers.mlp",
        "alibi_bias": "megazoo.layers.alibi",
        "alibi_slopes": "megazoo.layers.alibi",
        "attach_loss": "megazoo.layers.auxiliary",
        "gelu_tanh": "megazoo.layers.mlp",
        "pack_weights": "megazoo.layers.packed_weights",
        "rotate": "megazoo.layers.rotary",
        "multiply_in_float8": "megazoo.layers.float8",
        "round_to_float8": "megazoo.layers.float8",
        "round_to_int8": "megazoo.layers.linear",
        "segment_mask": "megazoo.layers.masks",
        "units_of_heads": "megazoo.layers.qkv",
        "vocab_parallel_cross_entropy": "megazoo.layers.cross_entropy",
        "window_mask": "megazoo.layers.masks",
    },
)

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
    "LayerNormPerHead",
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
    "multiply_in_float8",
    "pack_weights",
    "rotate",
    "round_to_float8",
    "round_to_int8",
    "segment_mask",
    "units_of_heads",
    "vocab_parallel_cross_entropy",
    "window_mask",
]
