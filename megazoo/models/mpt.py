"""MPT (MosaicML 2023) as defined by llm-foundry: ALiBi or learned positions, pre-norm blocks, exact
GELU.

    x = dropout(embedding(ids) [+ position_embedding(positions)])   first stage
    x = x + dropout(attention(attention_norm(x)))                   each layer
    x = x + dropout(down(gelu(up(mlp_norm(x)))))
    logits = norm(x) @ embedding.weight^T [* logit_scale]           last stage (untied: head.weight)

ALiBi is added to the attention scores; positions are learned only without it. Queries, keys and
values can be clipped (clip_qkv). Queries and keys can then be normalised, each over all heads
(qk_norm). That norm has an epsilon of 1e-5, regardless of norm_epsilon, because llm-foundry does
not pass its norm_eps to q_ln and k_ln.

Attention is causal, and tokens attend only to tokens of their own segment (packed documents;
padding is a separate segment). Weights are [out_features, in_features]. Tensor parallelism shards
them like this:

    embedding, head            rows: the vocabulary
    attention.qkv              rows: whole heads of each of q, k, v
    attention.q_norm, k_norm   whole heads
    attention.output           columns: whole heads
    mlp.up                     rows: inner features
    mlp.down                   columns: inner features
    replicated                 position_embedding, the other norms, biases of output and down

Each rank uses the ALiBi slopes of its heads. Each rank has the KV heads of its queries; if tp
exceeds their number, they are replicated. Biases of qkv and up, if any, are sharded like the rows
of their weights. Embedding and head are tied by default. They are one parameter if the same rank
has the first and the last stage. Otherwise each of the two ranks has a copy, and the copies stay
equal.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from megazoo.engine.microbatch import MicroBatch, static_steps
from megazoo.families.config import ModelConfig
from megazoo.families.names import HFFiles, HFNames
from megazoo.families.published import Published
from megazoo.families.registry import register
from megazoo.layers import (
    MLP,
    ALiBi,
    CausalSelfAttention,
    Dropout,
    HeadwiseLayerNorm,
    LayerNorm,
    PositionEmbedding,
    units_of_heads,
)
from megazoo.layers.layer import Layer
from megazoo.lazy import LazyModule
from megazoo.models.decoder import Decoder
from megazoo.models.masks import alibi_mask_of, mask_of

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.mpt")

QK_NORM_EPSILON = 1e-5


HUGGING_FACE = HFFiles(prefix="transformer.", legacy="")
NAMES = {
    "embedding": HFNames("transformer.wte"),
    "position_embedding": HFNames("transformer.wpe"),
    "layers.{}.attention_norm": HFNames("transformer.blocks.{}.norm_1"),
    "layers.{}.attention.qkv": HFNames("transformer.blocks.{}.attn.Wqkv"),
    "layers.{}.attention.q_norm": HFNames("transformer.blocks.{}.attn.q_ln"),
    "layers.{}.attention.k_norm": HFNames("transformer.blocks.{}.attn.k_ln"),
    "layers.{}.attention.output": HFNames("transformer.blocks.{}.attn.out_proj"),
    "layers.{}.mlp_norm": HFNames("transformer.blocks.{}.norm_2"),
    "layers.{}.mlp.up": HFNames("transformer.blocks.{}.ffn.up_proj"),
    "layers.{}.mlp.down": HFNames("transformer.blocks.{}.ffn.down_proj"),
    "norm": HFNames("transformer.norm_f"),
    "head": HFNames("lm_head"),
    "score": HFNames("score"),
}


@dataclass(frozen=True)
class MPTConfig(ModelConfig):
    """Configure an MPT. The defaults are mpt-7b, with 6.6 billion parameters."""

    vocab_size: int = 50432
    max_positions: int = 2048
    hidden_size: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 0  # 0: as many as heads
    ffn_size: int = 0  # 0: 4 x hidden_size
    alibi: bool = True
    alibi_bias_max: float = 8.0
    learned_positions: bool = True  # only without ALiBi
    clip_qkv: float | None = None
    qk_norm: bool = False
    softmax_scale: float | None = None  # None: head size ** -0.5
    logit_scale: float | None = None
    bias: bool = False  # on every norm and linear layer
    norm_epsilon: float = 1e-5  # except the norms of queries and keys: see QK_NORM_EPSILON
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0  # of the attention probabilities
    residual_dropout: float = 0.0  # of the outputs of attention and MLP
    tie_embeddings: bool = True

    def __post_init__(self):
        if not self.ffn_size:
            object.__setattr__(self, "ffn_size", 4 * self.hidden_size)
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> "MPTConfig":
        return cls(**hugging_face.read_config(fields, cls))

    def to_hugging_face(self) -> dict:
        return hugging_face.write_config(self)


def _head_norm(config: MPTConfig, heads: int, unit: int) -> HeadwiseLayerNorm:
    """Return the norm of queries or keys. unit: number of features that tensor parallelism does not
    split."""
    features = config.hidden_size // config.heads * heads
    return HeadwiseLayerNorm(features, unit, QK_NORM_EPSILON, bias=config.bias)


class Block(Layer):
    """One layer: [batch, sequence, hidden] -> the same shape. The initial weights of the residual
    projections are scaled down by depth. index: global index of the layer."""

    kernel_masks = True

    def __init__(self, config: MPTConfig, index: int):
        super().__init__()
        c, residual_std = config, 0.02 / math.sqrt(2 * config.layers)
        self.attention_norm = LayerNorm(c.hidden_size, c.norm_epsilon, bias=c.bias)
        query_unit, kv_unit, _ = units_of_heads(c.heads, c.kv_heads, c.hidden_size // c.heads)
        self.attention = CausalSelfAttention(
            c.hidden_size,
            c.heads,
            c.kv_heads,
            dropout=c.attention_dropout,
            scale=c.softmax_scale,
            clip_qkv=c.clip_qkv,
            q_norm=_head_norm(c, c.heads, query_unit) if c.qk_norm else None,
            k_norm=_head_norm(c, c.kv_heads, kv_unit) if c.qk_norm else None,
            bias=c.bias,
            output_std=residual_std,
        )
        self.attention_dropout = Dropout(c.residual_dropout)
        self.mlp_norm = LayerNorm(c.hidden_size, c.norm_epsilon, bias=c.bias)
        self.mlp = MLP(c.hidden_size, c.ffn_size, F.gelu, bias=c.bias, output_std=residual_std)
        self.mlp_dropout = Dropout(c.residual_dropout)

    def forward(
        self, x: torch.Tensor, batch: MicroBatch, mask: torch.Tensor | None
    ) -> torch.Tensor:
        seed = batch.dropout_seed
        attended = self.attention(self.attention_norm(x), seed, mask=mask, cache=batch.cache)
        x = x + self.attention_dropout(attended, seed)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), seed)


# MPT was trained with Lion, whose rates differ.
PUBLISHED = {
    "mpt-1b": Published("mosaicml/mpt-1b-redpajama-200b"),
    "mpt-7b": Published("mosaicml/mpt-7b"),
    "mpt-30b": Published("mosaicml/mpt-30b"),
}


@register("mpt")
class MPT(Decoder):
    Config, Block = MPTConfig, Block
    presets = {
        "mpt-tiny": MPTConfig(
            vocab_size=257, max_positions=256, hidden_size=128, layers=4, heads=4
        ),
        "mpt-1b": MPTConfig(vocab_size=50368, hidden_size=2048, layers=24, heads=16),
        "mpt-7b": MPTConfig(),
        "mpt-30b": MPTConfig(max_positions=8192, hidden_size=7168, layers=48, heads=64),
    }

    HUGGING_FACE_NAMES, HUGGING_FACE = NAMES, HUGGING_FACE

    def add_first(self) -> None:
        c, self.position_embedding = self.config, None
        if c.learned_positions and not c.alibi:
            self.position_embedding = PositionEmbedding(c.max_positions, c.hidden_size)
        self.embedding_dropout = Dropout(c.embedding_dropout)

    def add_shared(self) -> None:
        c, self.alibi = self.config, None  # the bias of this rank's heads, one for all layers
        if c.alibi and self.layers:
            layer: Any = next(iter(self.layers.values()))
            self.alibi = ALiBi(c.heads, layer.attention.heads, c.alibi_bias_max)

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden_size, self.config.norm_epsilon, bias=self.config.bias)

    @static_steps
    def embed(self, ids: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        x = self.embedding(ids)
        if self.position_embedding is not None:
            x = x + self.position_embedding(batch.positions(ids.device))
        return self.embedding_dropout(x, batch.dropout_seed)

    @static_steps
    def layer_inputs(self, x: torch.Tensor, batch: MicroBatch) -> tuple:
        if self.alibi is not None:
            return (alibi_mask_of(batch, self.alibi, x.dtype, x.device),)
        return (mask_of(batch, self.layers, x.dtype),)

    @static_steps
    def finish(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        if self.config.logit_scale is not None and not self.config.num_labels:
            x = x * self.config.logit_scale  # cheaper than scaling the logits
        return x
