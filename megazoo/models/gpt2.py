"""GPT-2 (Radford et al. 2019) and GPT-3's shape: learned positions, pre-norm blocks, GELU, tied
embeddings.

    x = dropout(embedding(ids) + position_embedding(positions))   first stage
    x = x + dropout(attention(attention_norm(x)))                 each layer
    x = x + dropout(down(activation(up(mlp_norm(x)))))
    logits = norm(x) @ embedding.weight^T                         last stage (untied: head.weight)

Attention is causal, and tokens attend only to tokens of their own segment (packed documents;
padding is a separate segment). Weights are [out_features, in_features]. Tensor parallelism shards
them like this:

    embedding, head    rows: the vocabulary
    attention.qkv      rows: whole heads of each of q, k, v
    attention.output   columns: whole heads
    mlp.up             rows: inner features
    mlp.down           columns: inner features
    replicated         norms, position_embedding, biases of output and down

Biases of qkv and up are sharded like the rows of their weights. Embedding and head are tied by
default. They are one parameter if the same rank has the first and the last stage. Otherwise each of
the two ranks has a copy, and the copies stay equal.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from megazoo.engine.microbatch import MicroBatch, static_steps
from megazoo.families.config import ModelConfig
from megazoo.families.names import HFFiles, HFNames
from megazoo.families.published import Published
from megazoo.families.registry import register
from megazoo.layers import (
    MLP,
    CausalSelfAttention,
    Dropout,
    LayerNorm,
    PositionEmbedding,
    activation_named,
)
from megazoo.layers.layer import Layer
from megazoo.lazy import LazyModule
from megazoo.models.decoder import Decoder
from megazoo.models.masks import mask_of

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.gpt2")


HUGGING_FACE = HFFiles(
    prefix="transformer.",
    legacy=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",  # buffers in older files
)
NAMES = {
    "embedding": HFNames("transformer.wte"),
    "position_embedding": HFNames("transformer.wpe"),
    "layers.{}.attention_norm": HFNames("transformer.h.{}.ln_1"),
    "layers.{}.attention.qkv": HFNames("transformer.h.{}.attn.c_attn", transposed=True),
    "layers.{}.attention.output": HFNames("transformer.h.{}.attn.c_proj", transposed=True),
    "layers.{}.mlp_norm": HFNames("transformer.h.{}.ln_2"),
    "layers.{}.mlp.up": HFNames("transformer.h.{}.mlp.c_fc", transposed=True),
    "layers.{}.mlp.down": HFNames("transformer.h.{}.mlp.c_proj", transposed=True),
    "norm": HFNames("transformer.ln_f"),
    "head": HFNames("lm_head"),
    "score": HFNames("score"),
}


@dataclass(frozen=True)
class GPT2Config(ModelConfig):
    """Configure a GPT2. The defaults are the smallest GPT-2, with 124 million parameters."""

    vocab_size: int = 50257
    max_positions: int = 1024
    hidden_size: int = 768
    layers: int = 12
    heads: int = 12
    ffn_size: int = 0  # 0: 4 x hidden_size
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.1  # of the attention probabilities
    residual_dropout: float = 0.1  # of the outputs of attention and MLP
    activation: str = "gelu_new"  # or another of Hugging Face's names: see megazoo.layers.mlp
    scale_attention: bool = True  # divide the scores by sqrt(head size)
    scale_by_inverse_layer: bool = False  # also divide them by the layer's index + 1
    layer_norm_epsilon: float = 1e-5
    tie_embeddings: bool = True

    def __post_init__(self):
        if not self.ffn_size:
            object.__setattr__(self, "ffn_size", 4 * self.hidden_size)

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> "GPT2Config":
        return cls(**hugging_face.read_config(fields, cls))

    def to_hugging_face(self) -> dict:
        return hugging_face.write_config(self)


class Block(Layer):
    """One layer: [batch, sequence, hidden] -> the same shape. The initial weights of the residual
    projections are scaled down by depth, as in GPT-2. index: global index of the layer."""

    kernel_masks = True

    def __init__(self, config: GPT2Config, index: int):
        super().__init__()
        c, residual_std = config, 0.02 / math.sqrt(2 * config.layers)
        scale = (c.hidden_size // c.heads) ** -0.5 if c.scale_attention else 1.0
        if c.scale_by_inverse_layer:
            scale /= index + 1
        self.attention_norm = LayerNorm(c.hidden_size, c.layer_norm_epsilon)
        self.attention = CausalSelfAttention(
            c.hidden_size,
            c.heads,
            dropout=c.attention_dropout,
            scale=scale,
            output_std=residual_std,
        )
        self.attention_dropout = Dropout(c.residual_dropout)
        self.mlp_norm = LayerNorm(c.hidden_size, c.layer_norm_epsilon)
        self.mlp = MLP(
            c.hidden_size, c.ffn_size, activation_named(c.activation), output_std=residual_std
        )
        self.mlp_dropout = Dropout(c.residual_dropout)

    def forward(
        self, x: torch.Tensor, batch: MicroBatch, mask: torch.Tensor | None
    ) -> torch.Tensor:
        seed = batch.dropout_seed
        attended = self.attention(self.attention_norm(x), seed, mask=mask, cache=batch.cache)
        x = x + self.attention_dropout(attended, seed)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), seed)


# Radford et al. 2019, section 2.3 (no rate). GPT-3: Brown et al. 2020, table 2.1.
PUBLISHED = {
    "gpt2": Published("openai-community/gpt2", None, 512 * 1024),
    "gpt2-124m": Published("openai-community/gpt2", None, 512 * 1024),
    "gpt2-355m": Published("openai-community/gpt2-medium", None, 512 * 1024),
    "gpt2-774m": Published("openai-community/gpt2-large", None, 512 * 1024),
    "gpt2-1.5b": Published("openai-community/gpt2-xl", None, 512 * 1024),
    "gpt2-xl": Published("openai-community/gpt2-xl", None, 512 * 1024),
    "gpt3-175b": Published(None, 0.6e-4, 3_200_000),
}


@register("gpt2")
class GPT2(Decoder):
    Config, Block = GPT2Config, Block
    presets = {
        "gpt2-tiny": GPT2Config(
            vocab_size=257, max_positions=256, hidden_size=128, layers=4, heads=4,
            embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0,
        ),
        "gpt2": GPT2Config(),
        "gpt2-124m": GPT2Config(),  # the same
        "gpt2-355m": GPT2Config(hidden_size=1024, layers=24, heads=16),
        "gpt2-774m": GPT2Config(hidden_size=1280, layers=36, heads=20),
        "gpt2-1.5b": GPT2Config(hidden_size=1600, layers=48, heads=25),
        "gpt2-xl": GPT2Config(hidden_size=1600, layers=48, heads=25),  # the same
        "gpt3-175b": GPT2Config(max_positions=2048, hidden_size=12288, layers=96, heads=96),
    }  # fmt: skip

    HUGGING_FACE_NAMES, HUGGING_FACE = NAMES, HUGGING_FACE

    def add_first(self) -> None:
        c = self.config
        self.position_embedding = PositionEmbedding(c.max_positions, c.hidden_size)
        self.embedding_dropout = Dropout(c.embedding_dropout)

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden_size, self.config.layer_norm_epsilon)

    @static_steps
    def embed(self, ids: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        x = self.embedding(ids) + self.position_embedding(batch.positions(ids.device))
        return self.embedding_dropout(x, batch.dropout_seed)

    @static_steps
    def layer_inputs(self, x: torch.Tensor, batch: MicroBatch) -> tuple:
        return (mask_of(batch, self.layers, x.dtype),)
