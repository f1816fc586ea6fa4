"""Layers that any model can be built from, in any module of your own.

Each takes the ambient parallel context (`with ctx:`) or `ctx=`, and works as it is in a plain
process.

What the rest of megazoo asks of a layer, it says by an attribute, and so can one of your own:
    multiplied      names of a ShardedModule's parameters that are matrices by which every token is
                    multiplied; `flops_per_token` counts them. None by default.
    score_features  features over which queries and keys are multiplied, of all tp ranks together;
                    `flops_per_token` counts them, and asks no module inside one that says so. 0
                    if the cost of an attention doesn't grow with the sequence.
    window          how many tokens a query looks at, itself included; None, the default: all before
                    it. `flops_per_token` counts them, and a KVCache keeps so many.
    recompute       False, and set to True by `model.recompute("selective")`: the module then keeps
                    less for backward, and computes the rest again there.
    context_parallel
                    True of a module that is right with a context-parallel rank's part of a
                    sequence: an attention that looks across the ranks, as CausalSelfAttention does,
                    or a layer in which no token looks at another. A model with a layer that says so
                    nowhere is not built at cp 2 or more. A class with a forward of its own says it
                    anew.
"""

from megazoo.layers.alibi import ALiBi, alibi_bias, alibi_slopes
from megazoo.layers.attention import (
    CausalSelfAttention,
    QKVParallelLinear,
    units_of_heads,
)
from megazoo.layers.cache import KVCache
from megazoo.layers.classification import ClassificationHead
from megazoo.layers.cross_entropy import vocab_parallel_cross_entropy
from megazoo.layers.dropout import Dropout
from megazoo.layers.embedding import PositionEmbedding, VocabParallelEmbedding, VocabParallelHead
from megazoo.layers.linear import ColumnParallelLinear, RowParallelLinear, round_to_int8
from megazoo.layers.masks import MaskPerChunk, MaskPerWindow, Packed, segment_mask, window_mask
from megazoo.layers.mlp import MLP, GatedMLP, activation_named, gelu_tanh
from megazoo.layers.norm import HeadwiseLayerNorm, LayerNorm, RMSNorm
from megazoo.layers.rotary import Rotary, rotate

__all__ = [
    "MLP",
    "ALiBi",
    "CausalSelfAttention",
    "ClassificationHead",
    "ColumnParallelLinear",
    "Dropout",
    "GatedMLP",
    "HeadwiseLayerNorm",
    "KVCache",
    "LayerNorm",
    "MaskPerChunk",
    "MaskPerWindow",
    "Packed",
    "PositionEmbedding",
    "QKVParallelLinear",
    "RMSNorm",
    "Rotary",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "activation_named",
    "alibi_bias",
    "alibi_slopes",
    "gelu_tanh",
    "rotate",
    "round_to_int8",
    "segment_mask",
    "units_of_heads",
    "vocab_parallel_cross_entropy",
    "window_mask",
]
