"""MPT (MosaicML 2023) as llm-foundry means it: ALiBi or learned positions, pre-norm blocks, exact GELU, no biases.

x = dropout(embedding(ids) [+ position_embedding])         first stage; positions only without ALiBi
x = x + dropout(attention(norm(x)))                         each layer; ALiBi is added to the scores
x = x + dropout(down(gelu(up(norm(x)))))
logits = norm(x) @ embedding.weight^T [* logit_scale]       last stage

Queries, keys and values can be clipped (clip_qkv) and then queries and keys normalised over all heads (qk_norm).
Tensor parallel: the vocabulary, the attention heads (with the slopes of the rank's own) and the MLP's inner features
are cut over the tp ranks.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from megazoo.layers import (
    MLP,
    CausalSelfAttention,
    Dropout,
    LayerNorm,
    PositionEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    alibi_bias,
    alibi_slopes,
    segment_mask,
)
from megazoo.models.base import Model
from megazoo.parallel.context import ParallelContext, Stage
from megazoo.parallel.pipeline import MicroBatch


@dataclass(frozen=True)
class MPTConfig:
    """The defaults are mpt-7b's, 6.6 billion parameters."""

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
    norm_epsilon: float = 1e-5
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    tie_embeddings: bool = True

    def __post_init__(self):
        if not self.ffn_size:
            object.__setattr__(self, "ffn_size", 4 * self.hidden_size)
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)


class Block(nn.Module):
    """[batch, sequence, hidden] -> the same. The residual projections start smaller, by depth."""

    def __init__(self, config: MPTConfig):
        super().__init__()
        c, residual_std = config, 0.02 / math.sqrt(2 * config.layers)
        self.attention_norm = LayerNorm(c.hidden_size, c.norm_epsilon, bias=c.bias)
        self.attention = CausalSelfAttention(
            c.hidden_size,
            c.heads,
            c.kv_heads,
            dropout=c.attention_dropout,
            scale=c.softmax_scale,
            clip_qkv=c.clip_qkv,
            qk_norm_epsilon=c.norm_epsilon if c.qk_norm else None,
            bias=c.bias,
            output_std=residual_std,
        )
        self.attention_dropout = Dropout(c.residual_dropout)
        self.mlp_norm = LayerNorm(c.hidden_size, c.norm_epsilon, bias=c.bias)
        self.mlp = MLP(c.hidden_size, c.ffn_size, F.gelu, bias=c.bias, output_std=residual_std)
        self.mlp_dropout = Dropout(c.residual_dropout)

    def forward(self, x: torch.Tensor, batch: MicroBatch, mask: torch.Tensor | None) -> torch.Tensor:
        seed = batch.dropout_seed
        attended = self.attention(self.attention_norm(x), seed, mask=mask)
        x = x + self.attention_dropout(attended, seed)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), seed)


class MPT(Model):
    Config = MPTConfig
    presets = {
        "mpt-tiny": MPTConfig(vocab_size=257, max_positions=256, hidden_size=128, layers=4, heads=4),
        "mpt-1b": MPTConfig(vocab_size=50368, hidden_size=2048, layers=24, heads=16),
        "mpt-7b": MPTConfig(),
        "mpt-30b": MPTConfig(max_positions=8192, hidden_size=7168, layers=48, heads=64),
    }

    def __init__(self, config: MPTConfig, ctx: ParallelContext, seed: int = 0):
        super().__init__(config, ctx, seed)
        c, first, last = config, self.stages[0].first, self.stages[-1].last
        if first or (last and c.tie_embeddings):  # a tied head far from the embedding has a copy of it
            self.embedding = VocabParallelEmbedding(c.vocab_size, c.hidden_size)
        if first:
            if c.learned_positions and not c.alibi:
                self.position_embedding = PositionEmbedding(c.max_positions, c.hidden_size)
            self.embedding_dropout = Dropout(c.embedding_dropout)
        self.layers = nn.ModuleDict({str(i): Block(c) for stage in self.stages for i in stage.layers})
        if last:
            self.norm = LayerNorm(c.hidden_size, c.norm_epsilon, bias=c.bias)
            if not c.tie_embeddings:
                self.head = VocabParallelHead(c.vocab_size, c.hidden_size)
        if c.tie_embeddings and ctx.pp_size > 1:
            self.tied = {"embedding.weight": (0, ctx.pp_size - 1)}

    def forward_stage(self, x: torch.Tensor, batch: MicroBatch, stage: Stage) -> torch.Tensor:
        if stage.first:  # x: token ids [batch, sequence]
            x = self.embedding(x)
            if hasattr(self, "position_embedding"):
                x = x + self.position_embedding(batch.positions(x.device))
            x = self.embedding_dropout(x, batch.dropout_seed)
        mask = segment_mask(batch.segments)
        if self.config.alibi and stage.layers:
            mask = self.alibi(batch.shape[1], x, mask)
        x = self.run_layers(x, stage, batch, mask)  # x: [batch, sequence, hidden]
        if stage.last:  # x: [batch, sequence, this rank's part of the vocabulary]
            x = self.output_head.logits(self.norm(x))
            if self.config.logit_scale is not None:
                x = x * self.config.logit_scale
        return x

    def alibi(self, sequence: int, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The bias of this rank's heads, one for all layers: [(batch,) heads, sequence, sequence]."""
        heads = next(iter(self.layers.values())).attention.heads
        slopes = alibi_slopes(self.config.heads, self.config.alibi_bias_max)
        return alibi_bias(slopes[heads.start : heads.stop], sequence, x.dtype, x.device, mask)

    @classmethod
    def stage_costs(cls, config: MPTConfig) -> tuple[float, float, float]:
        c, kv_size = config, config.hidden_size // config.heads * config.kv_heads
        layer = 2 * c.hidden_size * (c.hidden_size + kv_size) + 2 * c.hidden_size * c.ffn_size
        scores = min(c.max_positions, 4096) * c.hidden_size  # at a usual training length, not the longest
        return layer + scores, 2 * c.hidden_size, c.vocab_size * c.hidden_size
