"""Qwen2 and Qwen2.5 (Yang et al. 2024): a LLaMA with biases on queries, keys and values.

    x = x + attention(attention_norm(x))                            each layer
    x = x + down(activation(gate(mlp_norm(x))) * up(mlp_norm(x)))

The rest of the forward, the weights and how tensor parallelism cuts them are LLaMA's: see llama.py.
Layers after the first `full_layers` can have a window; those that were published have none.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from megazoo.engine.microbatch import MicroBatch
from megazoo.layers import CausalSelfAttention, GatedMLP, MaskPerWindow, RMSNorm, activation_named
from megazoo.layers.fused import CosAndSin
from megazoo.models.config import ModelConfig
from megazoo.models.hugging_face import llama as hugging_face
from megazoo.models.hugging_face.config import ConfigReader
from megazoo.models.hugging_face.windows import read_layer_types, write_layer_types
from megazoo.models.llama import Llama
from megazoo.models.registry import register


@dataclass(frozen=True)
class Qwen2Config(ModelConfig):
    """The defaults are transformers'."""

    vocab_size: int = 151936
    max_positions: int = 32768
    hidden_size: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 32  # 0: as many as heads
    head_size: int = 0  # 0: hidden_size / heads
    ffn_size: int = 22016
    activation: str = "silu"
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # Hugging Face's keys: see megazoo.layers.Rotary
    window: int = 0  # tokens that a query looks at, itself included; 0: all before it
    full_layers: int = 0  # the first ones, which have no window
    attention_dropout: float = 0.0  # of the attention probabilities
    tie_embeddings: bool = False

    def __post_init__(self):
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)

    @classmethod
    def from_hugging_face(cls, fields: ConfigReader) -> "Qwen2Config":
        values = hugging_face.read_config(fields, cls, hugging_face.FIELDS_WITHOUT_BIASES)
        return cls(**values, **read_layer_types(fields, values["layers"]))

    def to_hugging_face(self) -> dict:
        config = hugging_face.write_config(
            self, "qwen2", "Qwen2", hugging_face.FIELDS_WITHOUT_BIASES
        )
        return {**config, **write_layer_types(self)}


class Block(nn.Module):
    """A layer: [batch, sequence, hidden] -> the same. index: of it in the whole model."""

    def __init__(self, config: Qwen2Config, index: int):
        super().__init__()
        c, residual_std = config, 0.02 / math.sqrt(2 * config.layers)
        window = c.window if index >= c.full_layers else 0
        self.attention_norm = RMSNorm(c.hidden_size, c.norm_epsilon)
        self.attention = CausalSelfAttention(
            c.hidden_size, c.heads, c.kv_heads, c.head_size or None, window=window or None,
            dropout=c.attention_dropout, bias=True, output_bias=False, output_std=residual_std,
        )  # fmt: skip
        self.mlp_norm = RMSNorm(c.hidden_size, c.norm_epsilon)
        activation = activation_named(c.activation)
        self.mlp = GatedMLP(c.hidden_size, c.ffn_size, activation, output_std=residual_std)

    def forward(
        self, x: torch.Tensor, batch: MicroBatch, rotary: CosAndSin, mask: MaskPerWindow | None
    ) -> torch.Tensor:
        seed = batch.dropout_seed
        x = x + self.attention(self.attention_norm(x), seed, rotary, mask, batch.cache)
        return x + self.mlp(self.mlp_norm(x))


@register("qwen2")
class Qwen2(Llama):
    Config, Block = Qwen2Config, Block
    presets = {
        "qwen2-tiny": Qwen2Config(
            vocab_size=257, max_positions=256, hidden_size=128, layers=4, heads=4, kv_heads=2,
            ffn_size=384, tie_embeddings=True,
        ),
        "qwen2-0.5b": Qwen2Config(
            max_positions=131072, hidden_size=896, layers=24, heads=14, kv_heads=2, ffn_size=4864,
            rope_theta=1e6, tie_embeddings=True,
        ),
        "qwen2-1.5b": Qwen2Config(
            max_positions=131072, hidden_size=1536, layers=28, heads=12, kv_heads=2, ffn_size=8960,
            rope_theta=1e6, tie_embeddings=True,
        ),
        "qwen2-7b": Qwen2Config(
            vocab_size=152064, max_positions=131072, hidden_size=3584, layers=28, heads=28,
            kv_heads=4, ffn_size=18944, rope_theta=1e6,
        ),
        "qwen2-72b": Qwen2Config(
            vocab_size=152064, max_positions=131072, hidden_size=8192, layers=80, heads=64,
            kv_heads=8, ffn_size=29568, rope_theta=1e6,
        ),
        "qwen2.5-3b": Qwen2Config(
            hidden_size=2048, layers=36, heads=16, kv_heads=2, ffn_size=11008, rope_theta=1e6,
            tie_embeddings=True,
        ),
        "qwen2.5-32b": Qwen2Config(
            vocab_size=152064, max_positions=131072, hidden_size=5120, layers=64, heads=40,
            kv_heads=8, ffn_size=27648, norm_epsilon=1e-5, rope_theta=1e6,
        ),
    }  # fmt: skip
