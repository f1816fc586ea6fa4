"""Qwen3 (Yang et al. 2025): a LLaMA whose queries and keys are normalised, head by head.

    x = x + attention(attention_norm(x))                            each layer
    x = x + down(activation(gate(mlp_norm(x))) * up(mlp_norm(x)))

Every rank has both norms whole, and uses them on heads of its own. The other weights, how tensor
parallelism cuts them and the rest of the forward are LLaMA's: see llama.py. Layers after the first
`full_layers` can have a window; those that were published have none.
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
from megazoo.models.hugging_face.names import HFNames
from megazoo.models.hugging_face.windows import read_layer_types, write_layer_types
from megazoo.models.llama import Llama
from megazoo.models.registry import register

NAMES = hugging_face.NAMES | {
    "layers.{}.attention.q_norm": HFNames("model.layers.{}.self_attn.q_norm"),
    "layers.{}.attention.k_norm": HFNames("model.layers.{}.self_attn.k_norm"),
}
FIELDS = {ours: name for ours, name in hugging_face.FIELDS.items() if name != "mlp_bias"}


@dataclass(frozen=True)
class Qwen3Config(ModelConfig):
    """The defaults are transformers'."""

    vocab_size: int = 151936
    max_positions: int = 32768
    hidden_size: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 32  # 0: as many as heads
    head_size: int = 128
    ffn_size: int = 22016
    activation: str = "silu"
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # Hugging Face's keys: see megazoo.layers.Rotary
    window: int = 0  # tokens that a query looks at, itself included; 0: all before it
    full_layers: int = 0  # the first ones, which have no window
    attention_bias: bool = False  # on both projections
    attention_dropout: float = 0.0  # of the attention probabilities
    tie_embeddings: bool = False

    def __post_init__(self):
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)

    @classmethod
    def from_hugging_face(cls, fields: ConfigReader) -> "Qwen3Config":
        values = hugging_face.read_config(fields, cls, FIELDS)
        return cls(**values, **read_layer_types(fields, values["layers"]))

    def to_hugging_face(self) -> dict:
        config = hugging_face.write_config(self, "qwen3", "Qwen3", FIELDS)
        return {**config, **write_layer_types(self)}


class Block(nn.Module):
    """A layer: [batch, sequence, hidden] -> the same. index: of it in the whole model."""

    def __init__(self, config: Qwen3Config, index: int):
        super().__init__()
        c, residual_std = config, 0.02 / math.sqrt(2 * config.layers)
        head_size = c.head_size or c.hidden_size // c.heads
        window = c.window if index >= c.full_layers else 0
        self.attention_norm = RMSNorm(c.hidden_size, c.norm_epsilon)
        self.attention = CausalSelfAttention(
            c.hidden_size, c.heads, c.kv_heads, c.head_size or None, window=window or None,
            q_norm=RMSNorm(head_size, c.norm_epsilon, parallel=True),
            k_norm=RMSNorm(head_size, c.norm_epsilon, parallel=True),
            dropout=c.attention_dropout, bias=c.attention_bias, output_std=residual_std,
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


def _published(hidden: int, layers: int, heads: int, ffn: int, tied: bool = False) -> Qwen3Config:
    return Qwen3Config(
        max_positions=40960, hidden_size=hidden, layers=layers, heads=heads, kv_heads=8,
        ffn_size=ffn, rope_theta=1e6, tie_embeddings=tied,
    )  # fmt: skip


@register("qwen3")
class Qwen3(Llama):
    Config, Block = Qwen3Config, Block
    HUGGING_FACE_NAMES = NAMES
    presets = {
        "qwen3-tiny": Qwen3Config(
            vocab_size=257, max_positions=256, hidden_size=128, layers=4, heads=4, kv_heads=2,
            ffn_size=384, head_size=48, tie_embeddings=True,
        ),
        "qwen3-0.6b": _published(1024, 28, 16, 3072, tied=True),
        "qwen3-1.7b": _published(2048, 28, 16, 6144, tied=True),
        "qwen3-4b": _published(2560, 36, 32, 9728, tied=True),
        "qwen3-8b": _published(4096, 36, 32, 12288),
        "qwen3-14b": _published(5120, 40, 40, 17408),
        "qwen3-32b": _published(5120, 64, 64, 25600),
    }  # fmt: skip
