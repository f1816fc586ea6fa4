"""BLOOM (BigScience 2022): GPT-2 with ALiBi instead of learned positions, and a norm of the
embedding.

    x = embedding_norm(embedding(ids))                              first stage
    x = x + dropout(attention(attention_norm(x)))                   each layer
    x = x + dropout(down(gelu(up(mlp_norm(x)))))
    logits = norm(x) @ embedding.weight^T                           last stage

With residual_after_norm, the outputs of the norms are added instead of x. ALiBi is as in mpt.py; in
contrast to transformers, it counts padding inside a row.
Tensor parallelism shards the weights as in gpt2.py; embedding_norm is replicated.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megazoo.engine.microbatch import MicroBatch, static_steps
from megazoo.families.config import ModelConfig
from megazoo.families.names import HFFiles, HFNames
from megazoo.families.published import Published
from megazoo.families.registry import register
from megazoo.layers import MLP, ALiBi, CausalSelfAttention, Dropout, LayerNorm
from megazoo.layers.layer import Layer
from megazoo.layers.mlp import gelu_tanh
from megazoo.lazy import LazyModule
from megazoo.models.decoder import Decoder
from megazoo.models.masks import alibi_mask_of

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.bloom")


HUGGING_FACE = HFFiles(prefix="transformer.")
NAMES = {
    "embedding": HFNames("transformer.word_embeddings"),
    "embedding_norm": HFNames("transformer.word_embeddings_layernorm"),
    "layers.{}.attention_norm": HFNames("transformer.h.{}.input_layernorm"),
    "layers.{}.attention.qkv": HFNames(
        "transformer.h.{}.self_attention.query_key_value", grouped=True
    ),
    "layers.{}.attention.output": HFNames("transformer.h.{}.self_attention.dense"),
    "layers.{}.mlp_norm": HFNames("transformer.h.{}.post_attention_layernorm"),
    "layers.{}.mlp.up": HFNames("transformer.h.{}.mlp.dense_h_to_4h"),
    "layers.{}.mlp.down": HFNames("transformer.h.{}.mlp.dense_4h_to_h"),
    "norm": HFNames("transformer.ln_f"),
    "head": HFNames("lm_head"),
    "score": HFNames("score"),
}


@dataclass(frozen=True)
class BloomConfig(ModelConfig):
    """Configure a BLOOM. The defaults are bloom-560m."""

    vocab_size: int = 250880
    max_positions: int = 2048
    hidden_size: int = 1024
    layers: int = 24
    heads: int = 16
    norm_epsilon: float = 1e-5
    residual_after_norm: bool = False  # add the outputs of the norms, not their inputs
    attention_dropout: float = 0.0  # of the attention probabilities
    residual_dropout: float = 0.0  # of the outputs of attention and MLP
    tie_embeddings: bool = True

    @property
    def ffn_size(self) -> int:
        return 4 * self.hidden_size

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> "BloomConfig":
        return cls(**hugging_face.read_config(fields, cls))

    def to_hugging_face(self) -> dict:
        return hugging_face.write_config(self)


class Block(Layer):
    """One layer: [batch, sequence, hidden] -> the same shape. index: global index of the layer."""

    kernel_masks = True

    def __init__(self, config: BloomConfig, index: int):
        super().__init__()
        c, std = config, 0.02 / math.sqrt(2 * config.layers)
        self.residual_after_norm = c.residual_after_norm
        self.attention_norm = LayerNorm(c.hidden_size, c.norm_epsilon)
        self.attention = CausalSelfAttention(
            c.hidden_size, c.heads, dropout=c.attention_dropout, output_std=std
        )
        self.attention_dropout = Dropout(c.residual_dropout)
        self.mlp_norm = LayerNorm(c.hidden_size, c.norm_epsilon)
        self.mlp = MLP(c.hidden_size, c.ffn_size, gelu_tanh, output_std=std)
        self.mlp_dropout = Dropout(c.residual_dropout)

    def forward(
        self, x: torch.Tensor, batch: MicroBatch, mask: torch.Tensor | None
    ) -> torch.Tensor:
        seed, normed = batch.dropout_seed, self.attention_norm(x)
        attended = self.attention(normed, seed, mask=mask, cache=batch.cache)
        x = (normed if self.residual_after_norm else x) + self.attention_dropout(attended, seed)
        normed = self.mlp_norm(x)
        x = normed if self.residual_after_norm else x
        return x + self.mlp_dropout(self.mlp(normed), seed)


# BigScience 2022, table 3.
PUBLISHED = {
    "bloom-560m": Published("bigscience/bloom-560m", 3e-4, 256 * 2048),
    "bloom-1b1": Published("bigscience/bloom-1b1", 2.5e-4, 256 * 2048),
    "bloom-1b7": Published("bigscience/bloom-1b7", 2e-4, 512 * 2048),
    "bloom-3b": Published("bigscience/bloom-3b", 1.6e-4, 512 * 2048),
    "bloom-7b1": Published("bigscience/bloom-7b1", 1.2e-4, 512 * 2048),
    "bloom-176b": Published("bigscience/bloom", 6e-5, 2048 * 2048),
}


@register("bloom")
class Bloom(Decoder):
    Config, Block = BloomConfig, Block
    HUGGING_FACE_NAMES, HUGGING_FACE = NAMES, HUGGING_FACE
    presets = {
        # vocab_size, max_positions, hidden_size, layers, heads
        "bloom-tiny": BloomConfig(257, 256, 128, 4, 4),
        "bloom-560m": BloomConfig(),
        "bloom-1b1": BloomConfig(250880, 2048, 1536, 24, 16),
        "bloom-1b7": BloomConfig(250880, 2048, 2048, 24, 16),
        "bloom-3b": BloomConfig(250880, 2048, 2560, 30, 32),
        "bloom-7b1": BloomConfig(250880, 2048, 4096, 30, 32),
        "bloom-176b": BloomConfig(250880, 2048, 14336, 70, 112),
    }

    def add_first(self) -> None:
        self.embedding_norm = self.make_norm()

    def add_shared(self) -> None:
        self.alibi = None  # the bias of this rank's heads, one for all layers
        if self.layers:
            layer: Any = next(iter(self.layers.values()))
            self.alibi = ALiBi(self.config.heads, layer.attention.heads)

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden_size, self.config.norm_epsilon)

    @static_steps
    def embed(self, ids: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self.embedding_norm(self.embedding(ids))

    @static_steps
    def layer_inputs(self, x: torch.Tensor, batch: MicroBatch) -> tuple:
        if self.alibi is None:  # no layers
            return (None,)
        return (alibi_mask_of(batch, self.alibi, x.dtype, x.device),)
