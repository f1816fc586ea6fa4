"""Falcon (Almazrouei et al. 2023): attention and MLP in parallel, without biases in linear layers.

    x = x + dropout(attention(norm(x)) + mlp(norm(x)))                              falcon-7b
    x = x + dropout(attention(attention_norm(x)) + mlp(mlp_norm(x)))                falcon-40b

Falcon-7b has one key and value head. Falcon-40b has several, and two norms (separate_norms). Rotary
embeddings rotate queries and keys. Tensor parallelism shards the weights as in gpt2.py. The models
with ALiBi, or with attention before the MLP (falcon-rw), are not supported.
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
from megazoo.layers import MLP, CausalSelfAttention, Dropout, LayerNorm, Rotary, activation_named
from megazoo.layers.fused import CosAndSin
from megazoo.layers.layer import Layer
from megazoo.lazy import LazyModule
from megazoo.models.decoder import Decoder
from megazoo.models.masks import mask_of

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.falcon")


HUGGING_FACE = HFFiles(prefix="transformer.")
NAMES = {
    "embedding": HFNames("transformer.word_embeddings"),
    "layers.{}.norm": HFNames("transformer.h.{}.input_layernorm"),
    "layers.{}.attention_norm": HFNames("transformer.h.{}.ln_attn"),
    "layers.{}.mlp_norm": HFNames("transformer.h.{}.ln_mlp"),
    "layers.{}.attention.qkv": HFNames(
        "transformer.h.{}.self_attention.query_key_value", grouped=True
    ),
    "layers.{}.attention.output": HFNames("transformer.h.{}.self_attention.dense"),
    "layers.{}.mlp.up": HFNames("transformer.h.{}.mlp.dense_h_to_4h"),
    "layers.{}.mlp.down": HFNames("transformer.h.{}.mlp.dense_4h_to_h"),
    "norm": HFNames("transformer.ln_f"),
    "head": HFNames("lm_head"),
    "score": HFNames("score"),
}


@dataclass(frozen=True)
class FalconConfig(ModelConfig):
    """Configure a Falcon. The defaults are falcon-7b."""

    vocab_size: int = 65024
    max_positions: int = 2048
    hidden_size: int = 4544
    layers: int = 32
    heads: int = 71
    kv_heads: int = 1  # 0: as many as heads
    ffn_size: int = 0  # 0: 4 x hidden_size
    separate_norms: bool = (
        False  # a norm for attention and one for the MLP; otherwise they share it
    )
    bias: bool = False  # on all linear layers
    activation: str = "gelu"  # or another of Hugging Face's names: see megazoo.layers.mlp
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    attention_dropout: float = 0.0  # of the attention probabilities
    residual_dropout: float = 0.0  # of the sum of the outputs of attention and MLP
    tie_embeddings: bool = True

    def __post_init__(self):
        if not self.ffn_size:
            object.__setattr__(self, "ffn_size", 4 * self.hidden_size)
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> "FalconConfig":
        return cls(**hugging_face.read_config(fields, cls))

    def to_hugging_face(self) -> dict:
        return hugging_face.write_config(self)


class Block(Layer):
    """One layer: [batch, sequence, hidden] -> the same shape. index: global index of the layer."""

    kernel_masks = True

    def __init__(self, config: FalconConfig, index: int):
        super().__init__()
        c, std = config, 0.02 / math.sqrt(2 * config.layers)
        self.separate_norms = c.separate_norms
        if c.separate_norms:
            self.attention_norm = LayerNorm(c.hidden_size, c.norm_epsilon)
            self.mlp_norm = LayerNorm(c.hidden_size, c.norm_epsilon)
        else:
            self.norm = LayerNorm(c.hidden_size, c.norm_epsilon)
        self.attention = CausalSelfAttention(
            c.hidden_size,
            c.heads,
            c.kv_heads,
            dropout=c.attention_dropout,
            bias=c.bias,
            output_std=std,
        )
        activation = activation_named(c.activation)
        self.mlp = MLP(c.hidden_size, c.ffn_size, activation, bias=c.bias, output_std=std)
        self.dropout = Dropout(c.residual_dropout)

    def forward(
        self, x: torch.Tensor, batch: MicroBatch, rotary: CosAndSin, mask: torch.Tensor | None
    ) -> torch.Tensor:
        seed = batch.dropout_seed
        if self.separate_norms:
            to_attention, to_mlp = self.attention_norm(x), self.mlp_norm(x)
        else:
            to_attention = to_mlp = self.norm(x)
        attended = self.attention(to_attention, seed, rotary, mask, batch.cache)
        return x + self.dropout(self.mlp(to_mlp) + attended, seed)


# The model cards.
PUBLISHED = {
    "falcon-7b": Published("tiiuae/falcon-7b", 6e-4, 2304 * 2048),
    "falcon-40b": Published("tiiuae/falcon-40b", 1.85e-4, 1152 * 2048),
}


@register("falcon")
class Falcon(Decoder):
    Config, Block = FalconConfig, Block
    HUGGING_FACE_NAMES, HUGGING_FACE = NAMES, HUGGING_FACE
    presets = {
        # vocab_size, max_positions, hidden_size, layers, heads, kv_heads
        "falcon-tiny": FalconConfig(257, 256, 128, 4, 4, 2, separate_norms=True),
        "falcon-7b": FalconConfig(),
        "falcon-40b": FalconConfig(65024, 2048, 8192, 60, 128, 8, separate_norms=True),
    }

    def add_shared(self) -> None:
        c = self.config
        self.rotary = Rotary(c.hidden_size // c.heads, c.rope_theta, c.max_positions)

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden_size, self.config.norm_epsilon)

    @static_steps
    def layer_inputs(self, x: torch.Tensor, batch: MicroBatch) -> tuple:
        rotary = self.rotary(batch.positions(x.device), x.dtype)
        return rotary, mask_of(batch, self.layers, x.dtype)
