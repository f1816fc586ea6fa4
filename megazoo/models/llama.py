"""LLaMA 1, 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024): RMSNorm, pre-norm blocks, rotary
positions, grouped queries, SwiGLU.

    x = embedding(ids)                                              first stage
    x = x + attention(attention_norm(x))                            each layer
    x = x + down(activation(gate(mlp_norm(x))) * up(mlp_norm(x)))
    logits = norm(x) @ head.weight^T                                last stage (tied: the embedding)

Rotary embeddings rotate queries and keys. Attention is causal, and tokens attend only to tokens of
their own segment (packed documents; padding is a separate segment). Weights are [out_features,
in_features]. Tensor parallelism shards them like this:

    embedding, head    rows: the vocabulary
    attention.qkv      rows: whole heads of each of q, k, v
    attention.output   columns: whole heads
    mlp.gate_up        rows: inner features of gate and of up
    mlp.down           columns: inner features
    replicated         norms, biases of output and down

Each rank has the KV heads of its queries; if tp exceeds their number, they are replicated. Biases
of qkv and gate_up, if any, are sharded like the rows of their weights. Embedding and head are
separate by default. If tied, they are one parameter if the same rank has the first and the last
stage. Otherwise each of the two ranks has a copy, and the copies stay equal.
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
from megazoo.layers import (
    CausalSelfAttention,
    GatedMLP,
    RMSNorm,
    Rotary,
    activation_named,
)
from megazoo.layers.layer import Layer
from megazoo.layers.rotary import rotated_features
from megazoo.lazy import LazyModule
from megazoo.models.decoder import Decoder
from megazoo.models.masks import mask_of

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.llama")


HUGGING_FACE = HFFiles(
    prefix="model.",
    legacy=r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",  # a buffer in older files
)
NAMES = {
    "embedding": HFNames("model.embed_tokens"),
    "layers.{}.attention_norm": HFNames("model.layers.{}.input_layernorm"),
    "layers.{}.attention.qkv": HFNames(
        "model.layers.{}.self_attn.q_proj",
        "model.layers.{}.self_attn.k_proj",
        "model.layers.{}.self_attn.v_proj",
    ),
    "layers.{}.attention.output": HFNames("model.layers.{}.self_attn.o_proj"),
    "layers.{}.mlp_norm": HFNames("model.layers.{}.post_attention_layernorm"),
    "layers.{}.mlp.gate_up": HFNames(
        "model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"
    ),
    "layers.{}.mlp.down": HFNames("model.layers.{}.mlp.down_proj"),
    "norm": HFNames("model.norm"),
    "head": HFNames("lm_head"),
    "score": HFNames("score"),
}


@dataclass(frozen=True)
class LlamaFamilyConfig(ModelConfig):
    """Configure LLaMA and the families that are built on it. The defaults are LLaMA 1 with 7
    billion parameters."""

    vocab_size: int = 32000
    max_positions: int = 2048  # rope_scaling may extend it: see megazoo.layers.Rotary
    hidden_size: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 0  # 0: as many as heads
    head_size: int = 0  # 0: hidden_size / heads
    ffn_size: int = 11008
    activation: str = "silu"  # of the gate; or another of Hugging Face's names: see layers/mlp.py
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # Hugging Face's keys: see megazoo.layers.Rotary
    attention_dropout: float = 0.0  # of the attention probabilities
    tie_embeddings: bool = False
    # A family in which these vary declares them as fields.
    attention_bias = False
    mlp_bias = False
    rotary_fraction = 1.0  # share of a head's features (the first ones) that are rotated
    norm = RMSNorm  # the class of all norms of the size hidden_size: norm(size, epsilon)

    def __post_init__(self):
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)


@dataclass(frozen=True)
class LlamaConfig(LlamaFamilyConfig):
    """Configure a Llama, optionally with biases."""

    attention_bias: bool = False  # on qkv and output
    mlp_bias: bool = False  # on gate_up and down

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> "LlamaConfig":
        return cls(**hugging_face.read_config(fields, cls))

    def to_hugging_face(self) -> dict:
        return hugging_face.write_config(self, "llama")


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _rotary(c: LlamaFamilyConfig) -> Rotary:
    head_size = c.head_size or c.hidden_size // c.heads
    rotated = rotated_features(head_size, c.rotary_fraction)
    return Rotary(rotated, c.rope_theta, c.max_positions, c.rope_scaling)


class Block(Layer):
    """One layer: [batch, sequence, hidden] -> the same shape. The initial weights of the residual
    projections are scaled down by depth. index: global index of the layer."""

    kernel_masks = True

    def __init__(self, config: LlamaFamilyConfig, index: int):
        super().__init__()
        c, residual_std = config, 0.02 / math.sqrt(2 * config.layers)
        settings: dict[str, Any] = {"bias": c.attention_bias} | self.attention_settings(c, index)
        self.attention_norm = c.norm(c.hidden_size, c.norm_epsilon)
        self.attention = CausalSelfAttention(
            c.hidden_size,
            c.heads,
            c.kv_heads,
            c.head_size or None,
            dropout=c.attention_dropout,
            output_std=residual_std,
            **settings,
        )
        self.mlp_norm = c.norm(c.hidden_size, c.norm_epsilon)
        self.add_mlp(c, index, residual_std)

    def add_mlp(self, config: LlamaFamilyConfig, index: int, residual_std: float) -> None:
        """Add the feed-forward part. residual_std: of the initial weights of its output."""
        c = config
        self.mlp = GatedMLP(
            c.hidden_size,
            c.ffn_size,
            activation_named(c.activation),
            bias=c.mlp_bias,
            output_std=residual_std,
        )

    def attention_settings(self, config: LlamaFamilyConfig, index: int) -> dict:
        """Return additional arguments of CausalSelfAttention for a family that needs them, such as
        {"soft_cap": 50.0}."""
        return {}

    def forward(
        self,
        x: torch.Tensor,
        batch: MicroBatch,
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        x = x + self.attention(
            self.attention_norm(x), batch.dropout_seed, rotary, mask, batch.cache
        )
        return x + self.mlp(self.mlp_norm(x))


# Touvron et al. 2023, table 2. Llama 2: Touvron et al. 2023, table 1. Llama 3: Grattafiori et
# al. 2024, table 3 (no batch for 8B and 70B).
PUBLISHED = {
    "llama-7b": Published("huggyllama/llama-7b", 3e-4, 4_000_000),
    "llama-13b": Published("huggyllama/llama-13b", 3e-4, 4_000_000),
    "llama-30b": Published("huggyllama/llama-30b", 1.5e-4, 4_000_000),
    "llama-65b": Published("huggyllama/llama-65b", 1.5e-4, 4_000_000),
    "llama2-70b": Published("meta-llama/Llama-2-70b-hf", 1.5e-4, 4_000_000),
    "llama3-8b": Published("meta-llama/Meta-Llama-3-8B", 3e-4),
    "llama3-70b": Published("meta-llama/Meta-Llama-3-70B", 1.5e-4),
    "llama3.2-1b": Published("meta-llama/Llama-3.2-1B"),
}


@register("llama")
class Llama(Decoder):
    Config, Block = LlamaConfig, Block
    presets = {
        "llama-tiny": LlamaConfig(
            vocab_size=257, max_positions=256, hidden_size=128, layers=4, heads=4, kv_heads=2,
            ffn_size=384,
        ),
        "llama-7b": LlamaConfig(),
        "llama-13b": LlamaConfig(hidden_size=5120, layers=40, heads=40, ffn_size=13824),
        "llama-30b": LlamaConfig(hidden_size=6656, layers=60, heads=52, ffn_size=17920),
        "llama-65b": LlamaConfig(
            hidden_size=8192, layers=80, heads=64, ffn_size=22016, norm_epsilon=1e-5
        ),
        "llama2-70b": LlamaConfig(
            max_positions=4096, hidden_size=8192, layers=80, heads=64, kv_heads=8, ffn_size=28672,
            norm_epsilon=1e-5,
        ),
        "llama3-8b": LlamaConfig(
            vocab_size=128256, max_positions=8192, kv_heads=8, ffn_size=14336, norm_epsilon=1e-5,
            rope_theta=5e5,
        ),
        "llama3-70b": LlamaConfig(
            vocab_size=128256, max_positions=8192, hidden_size=8192, layers=80, heads=64,
            kv_heads=8, ffn_size=28672, norm_epsilon=1e-5, rope_theta=5e5,
        ),
        "llama3.2-1b": LlamaConfig(
            vocab_size=128256, max_positions=131072, hidden_size=2048, layers=16, heads=32,
            kv_heads=8, ffn_size=8192, norm_epsilon=1e-5, rope_theta=5e5,
            rope_scaling=LLAMA3_SCALING, tie_embeddings=True,
        ),
    }  # fmt: skip

    HUGGING_FACE_NAMES, HUGGING_FACE = NAMES, HUGGING_FACE

    def add_shared(self) -> None:
        self.rotary = _rotary(self.config)

    def make_norm(self) -> nn.Module:
        return self.config.norm(self.config.hidden_size, self.config.norm_epsilon)

    @static_steps
    def layer_inputs(self, x: torch.Tensor, batch: MicroBatch) -> tuple:
        rotary = self.rotary(batch.positions(x.device), x.dtype, batch.longest)
        return rotary, mask_of(batch, self.layers, x.dtype)

    @classmethod
    def longest_sequence(cls, config: LlamaConfig) -> int:
        """Return the maximum sequence length in tokens: max_positions, or more if the rotary
        scaling extends it (see `Rotary.longest`)."""
        return _rotary(config).longest

    @classmethod
    def can_cache(cls, config: LlamaConfig, length: int) -> bool:
        # Beyond the model's context, dynamic scaling rotates all keys again for every token.
        kind = (config.rope_scaling or {}).get("rope_type")
        return kind != "dynamic" or length <= config.max_positions
