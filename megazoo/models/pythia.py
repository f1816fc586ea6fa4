"""Pythia (Biderman et al. 2023), a GPT-NeoX: attention and MLP have the same input x, in parallel.

    x = x + dropout(attention(attention_norm(x))) + dropout(mlp(mlp_norm(x)))       each layer

Rotary embeddings rotate the first quarter of each head's features. Tensor parallelism shards the
weights as in gpt2.py.
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
from megazoo.layers.rotary import rotated_features
from megazoo.lazy import LazyModule
from megazoo.models.decoder import Decoder
from megazoo.models.masks import mask_of

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.pythia")


HUGGING_FACE = HFFiles(
    model_type="gpt_neox",
    prefix="gpt_neox.",
    # buffers in older files
    legacy=r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)
NAMES = {
    "embedding": HFNames("gpt_neox.embed_in"),
    "layers.{}.attention_norm": HFNames("gpt_neox.layers.{}.input_layernorm"),
    "layers.{}.attention.qkv": HFNames(
        "gpt_neox.layers.{}.attention.query_key_value", grouped=True
    ),
    "layers.{}.attention.output": HFNames("gpt_neox.layers.{}.attention.dense"),
    "layers.{}.mlp_norm": HFNames("gpt_neox.layers.{}.post_attention_layernorm"),
    "layers.{}.mlp.up": HFNames("gpt_neox.layers.{}.mlp.dense_h_to_4h"),
    "layers.{}.mlp.down": HFNames("gpt_neox.layers.{}.mlp.dense_4h_to_h"),
    "norm": HFNames("gpt_neox.final_layer_norm"),
    "head": HFNames("embed_out"),
    "score": HFNames("score"),
}


@dataclass(frozen=True)
class PythiaConfig(ModelConfig):
    """Configure a Pythia. The defaults are those of transformers."""

    vocab_size: int = 50432
    max_positions: int = 2048
    hidden_size: int = 6144
    layers: int = 44
    heads: int = 64
    ffn_size: int = 24576
    activation: str = "gelu"  # or another of Hugging Face's names: see megazoo.layers.mlp
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rotary_fraction: float = 0.25  # share of a head's features (the first ones) that are rotated
    parallel: bool = True  # attention and MLP have the same input; False: sequential
    attention_bias: bool = True  # on qkv and output
    attention_dropout: float = 0.0  # of the attention probabilities
    residual_dropout: float = 0.0  # of the embedding and of the outputs of attention and MLP
    tie_embeddings: bool = False

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> "PythiaConfig":
        return cls(**hugging_face.read_config(fields, cls))

    def to_hugging_face(self) -> dict:
        return hugging_face.write_config(self)


class Block(Layer):
    """One layer: [batch, sequence, hidden] -> the same shape. index: global index of the layer."""

    kernel_masks = True

    def __init__(self, config: PythiaConfig, index: int):
        super().__init__()
        c, std = config, 0.02 / math.sqrt(2 * config.layers)
        self.parallel = c.parallel
        self.attention_norm = LayerNorm(c.hidden_size, c.norm_epsilon)
        bias, dropout = c.attention_bias, c.attention_dropout
        self.attention = CausalSelfAttention(
            c.hidden_size, c.heads, dropout=dropout, bias=bias, output_std=std
        )
        self.attention_dropout = Dropout(c.residual_dropout)
        self.mlp_norm = LayerNorm(c.hidden_size, c.norm_epsilon)
        self.mlp = MLP(c.hidden_size, c.ffn_size, activation_named(c.activation), output_std=std)
        self.mlp_dropout = Dropout(c.residual_dropout)

    def forward(
        self, x: torch.Tensor, batch: MicroBatch, rotary: CosAndSin, mask: torch.Tensor | None
    ) -> torch.Tensor:
        seed = batch.dropout_seed
        attended = self.attention(self.attention_norm(x), seed, rotary, mask, batch.cache)
        after = x + self.attention_dropout(attended, seed)
        read = x if self.parallel else after
        return after + self.mlp_dropout(self.mlp(self.mlp_norm(read)), seed)


# Biderman et al. 2023; GPT-NeoX: Black et al. 2022, table 2.
PUBLISHED = {
    "pythia-70m": Published("EleutherAI/pythia-70m", 1e-3, 1024 * 2048),
    "pythia-160m": Published("EleutherAI/pythia-160m", 6e-4, 1024 * 2048),
    "pythia-410m": Published("EleutherAI/pythia-410m", 3e-4, 1024 * 2048),
    "pythia-1b": Published("EleutherAI/pythia-1b", 3e-4, 1024 * 2048),
    "pythia-1.4b": Published("EleutherAI/pythia-1.4b", 2e-4, 1024 * 2048),
    "pythia-2.8b": Published("EleutherAI/pythia-2.8b", 1.6e-4, 1024 * 2048),
    "pythia-6.9b": Published("EleutherAI/pythia-6.9b", 1.2e-4, 1024 * 2048),
    "pythia-12b": Published("EleutherAI/pythia-12b", 1.2e-4, 1024 * 2048),
    "neox-20b": Published("EleutherAI/gpt-neox-20b", 0.97e-4, 3_150_000),
}


@register("pythia")
class Pythia(Decoder):
    Config, Block = PythiaConfig, Block
    HUGGING_FACE_NAMES, HUGGING_FACE = NAMES, HUGGING_FACE
    presets = {
        # vocab_size, max_positions, hidden_size, layers, heads, ffn_size
        "pythia-tiny": PythiaConfig(257, 256, 128, 4, 4, 512),
        "pythia-70m": PythiaConfig(50304, 2048, 512, 6, 8, 2048),
        "pythia-160m": PythiaConfig(50304, 2048, 768, 12, 12, 3072),
        "pythia-410m": PythiaConfig(50304, 2048, 1024, 24, 16, 4096),
        "pythia-1b": PythiaConfig(50304, 2048, 2048, 16, 8, 8192),
        "pythia-1.4b": PythiaConfig(50304, 2048, 2048, 24, 16, 8192),
        "pythia-2.8b": PythiaConfig(50304, 2048, 2560, 32, 32, 10240),
        "pythia-6.9b": PythiaConfig(50432, 2048, 4096, 32, 32, 16384),
        "pythia-12b": PythiaConfig(50688, 2048, 5120, 36, 40, 20480),
        "neox-20b": PythiaConfig(50432, 2048, 6144, 44, 64, 24576, activation="gelu_fast"),
    }

    def add_first(self) -> None:
        self.embedding_dropout = Dropout(self.config.residual_dropout)

    def add_shared(self) -> None:
        c = self.config
        rotated = rotated_features(c.hidden_size // c.heads, c.rotary_fraction)
        self.rotary = Rotary(rotated, c.rope_theta, c.max_positions)

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden_size, self.config.norm_epsilon)

    @static_steps
    def embed(self, ids: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self.embedding_dropout(self.embedding(ids), batch.dropout_seed)

    @static_steps
    def layer_inputs(self, x: torch.Tensor, batch: MicroBatch) -> tuple:
        rotary = self.rotary(batch.positions(x.device), x.dtype)
        return rotary, mask_of(batch, self.layers, x.dtype)
