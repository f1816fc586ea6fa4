"""Phi-3 and Phi-4 (Abdin et al. 2024): LLaMA with optional windows, dropout, and rotary embeddings
of a part of each head.

    x = x + dropout(attention(attention_norm(x)))                   each layer
    x = x + dropout(mlp(mlp_norm(x)))

Hugging Face files have one tensor for queries, keys and values, and one for gate and up, in the
order of megazoo. The scaling longrope (Phi-3 with 128k tokens) is not supported. Other
parts are as in llama.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError
from megazoo.families.names import HFNames
from megazoo.families.published import Published
from megazoo.families.registry import register
from megazoo.layers import Dropout
from megazoo.layers.fused import CosAndSin
from megazoo.lazy import LazyModule
from megazoo.models import llama

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.llama")
window_files = LazyModule("megazoo.formats.hugging_face.windows")

NAMES = llama.NAMES | {
    "layers.{}.attention.qkv": HFNames("model.layers.{}.self_attn.qkv_proj"),
    "layers.{}.mlp.gate_up": HFNames("model.layers.{}.mlp.gate_up_proj"),
}


@dataclass(frozen=True)
class Phi3Config(llama.LlamaFamilyConfig):
    """Configure a Phi-3. The defaults are those of transformers."""

    vocab_size: int = 32064
    max_positions: int = 4096
    hidden_size: int = 3072
    ffn_size: int = 8192
    norm_epsilon: float = 1e-5
    window: int = 0  # tokens that a query attends to, itself included; 0: all before it
    rotary_fraction: float = 1.0  # share of a head's features (the first ones) that are rotated
    residual_dropout: float = 0.0  # of the outputs of attention and MLP

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> "Phi3Config":
        fields.take("original_max_position_embeddings")  # of longrope
        fields.take("embd_pdrop")  # has no effect in transformers
        fields.only("attention_bias", False)
        window = window_files.read_window(fields, 1) if "sliding_window" in fields.values else 0
        values = hugging_face.read_config(fields, cls)
        if scaling := values["rope_scaling"]:  # transformers reads yarn as longrope
            raise UserError(
                f"rope_type {scaling['rope_type']!r} is not supported: it must be 'default'"
            )
        dropout = fields.take("resid_pdrop", cls.residual_dropout)
        return cls(**values, window=window, residual_dropout=dropout)

    def to_hugging_face(self) -> dict:
        values = hugging_face.write_config(self, "phi3")
        own = {"sliding_window": self.window or None, "resid_pdrop": self.residual_dropout}
        if self.rotary_fraction == 1:
            del values["partial_rotary_factor"]
        return values | own


class Block(llama.Block):
    kernel_masks = True

    def __init__(self, config: Phi3Config, index: int):
        super().__init__(config, index)
        self.attention_dropout = Dropout(config.residual_dropout)
        self.mlp_dropout = Dropout(config.residual_dropout)

    def attention_settings(self, config: Phi3Config, index: int) -> dict:
        return {"window": config.window or None}

    def forward(
        self, x: torch.Tensor, batch: MicroBatch, rotary: CosAndSin, mask: torch.Tensor | None
    ) -> torch.Tensor:
        seed = batch.dropout_seed
        attended = self.attention(self.attention_norm(x), seed, rotary, mask, batch.cache)
        x = x + self.attention_dropout(attended, seed)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), seed)


PUBLISHED = {
    "phi3-mini": Published("microsoft/Phi-3-mini-4k-instruct"),
    "phi3-medium": Published("microsoft/Phi-3-medium-4k-instruct"),
    "phi4": Published("microsoft/phi-4"),
}


@register("phi3")
class Phi3(llama.Llama):
    Config, Block = Phi3Config, Block
    HUGGING_FACE_NAMES = NAMES
    presets = {
        # vocab_size, max_positions, hidden_size, layers, heads, kv_heads, head_size, ffn_size
        "phi3-tiny": Phi3Config(257, 256, 128, 4, 4, 2, 0, 384, window=48),
        "phi3-mini": Phi3Config(window=2047),
        "phi3-medium": Phi3Config(32064, 4096, 5120, 40, 40, 10, 0, 17920, window=2047),
        "phi4": Phi3Config(100352, 16384, 5120, 40, 40, 10, 0, 17920, rope_theta=250000.0),
    }
