"""Mistral (Jiang et al. 2023): a LLaMA whose queries may look back over a window of tokens alone.

    x = x + attention(attention_norm(x))                            each layer, in the window
    x = x + down(activation(gate(mlp_norm(x))) * up(mlp_norm(x)))

The rest of the forward is LLaMA's, and so are the weights, their names and the way that tensor
parallelism cuts them: see llama.py. Version 0.1 has windows, later ones look at all tokens.
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
from megazoo.models.hugging_face.windows import read_window
from megazoo.models.llama import Llama
from megazoo.models.registry import register


@dataclass(frozen=True)
class MistralConfig(ModelConfig):
    """The defaults are transformers'."""

    vocab_size: int = 32000
    max_positions: int = 131072
    hidden_size: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8  # 0: as many as heads
    head_size: int = 0  # 0: hidden_size / heads
    ffn_size: int = 14336
    activation: str = "silu"
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # Hugging Face's keys: see megazoo.layers.Rotary
    window: int = 4096  # tokens that a query looks at, itself included; 0: all before it
    attention_dropout: float = 0.0  # of the attention probabilities
    tie_embeddings: bool = False

    def __post_init__(self):
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)

    @classmethod
    def from_hugging_face(cls, fields: ConfigReader) -> "MistralConfig":
        values = hugging_face.read_config(fields, cls, hugging_face.FIELDS_WITHOUT_BIASES)
        return cls(**values, window=read_window(fields, cls.window))

    def to_hugging_face(self) -> dict:
        names = hugging_face.FIELDS_WITHOUT_BIASES
        config = hugging_face.write_config(self, "mistral", "Mistral", names)
        return {**config, "sliding_window": self.window or None}


class Block(nn.Module):
    """A layer: [batch, sequence, hidden] -> the same. The residual projections start smaller, by
    depth. index: of the layer in the whole model."""

    def __init__(self, config: MistralConfig, index: int):
        super().__init__()
        c, residual_std = config, 0.02 / math.sqrt(2 * config.layers)
        self.attention_norm = RMSNorm(c.hidden_size, c.norm_epsilon)
        self.attention = CausalSelfAttention(
            c.hidden_size, c.heads, c.kv_heads, c.head_size or None, window=c.window or None,
            dropout=c.attention_dropout, bias=False, output_std=residual_std,
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


@register("mistral")
class Mistral(Llama):
    Config, Block = MistralConfig, Block
    presets = {
        "mistral-tiny": MistralConfig(
            vocab_size=257, max_positions=256, hidden_size=128, layers=4, heads=4, kv_heads=2,
            ffn_size=384, window=48,
        ),
        "mistral-7b-v0.1": MistralConfig(max_positions=32768, norm_epsilon=1e-5),
        "mistral-7b-v0.3": MistralConfig(
            vocab_size=32768, max_positions=32768, norm_epsilon=1e-5, rope_theta=1e6, window=0
        ),
        "mistral-nemo-12b": MistralConfig(
            vocab_size=131072, hidden_size=5120, layers=40, head_size=128, norm_epsilon=1e-5,
            rope_theta=1e6, window=0,
        ),
        "mistral-small-24b": MistralConfig(
            vocab_size=131072, max_positions=32768, hidden_size=5120, layers=40, head_size=128,
            ffn_size=32768, norm_epsilon=1e-5, rope_theta=1e8, window=0,
        ),
    }  # fmt: skip
