"""StableLM and StableLM 2 (Bellagente et al. 2024): LLaMA with LayerNorm and rotary embeddings of a
quarter of each head.

    x = x + attention(attention_norm(x))                                            each layer
    x = x + dropout(mlp(mlp_norm(x)))

With `parallel`, attention and MLP have the same input, and one norm:

    x = x + attention(attention_norm(x)) + dropout(mlp(attention_norm(x)))          each layer

Queries, keys and values can have biases. With `head_norms`, each head of the queries and of the
keys has a norm with its own weight; tensor parallelism shards these norms by heads. All other parts
are as in llama.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError
from megazoo.families.names import HFNames
from megazoo.families.published import Published
from megazoo.families.registry import register
from megazoo.layers import Dropout, LayerNorm, LayerNormPerHead, units_of_heads
from megazoo.layers.fused import CosAndSin
from megazoo.lazy import LazyModule
from megazoo.models import llama

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.llama")

NAMES = llama.NAMES | {
    f"layers.{{}}.attention.{part}_norm": HFNames(
        f"model.layers.{{}}.self_attn.{part}_layernorm.norms.[]"
    )
    for part in "qk"
}


@dataclass(frozen=True)
class StableLMConfig(llama.LlamaFamilyConfig):
    """Configure a StableLM. The defaults are those of transformers."""

    vocab_size: int = 50304
    max_positions: int = 4096
    hidden_size: int = 2560
    kv_heads: int = 32  # 0: as many as heads
    ffn_size: int = 6912
    norm_epsilon: float = 1e-5
    rotary_fraction: float = 0.25  # share of a head's features (the first ones) that are rotated
    attention_bias: bool = False  # on qkv
    head_norms: bool = False  # a norm for each head of queries and keys
    parallel: bool = False  # attention and MLP have the same input
    residual_dropout: float = 0.0  # of the output of the MLP
    norm = LayerNorm

    FILE_FIELDS: ClassVar = {
        "layer_norm_eps": "norm_epsilon",
        "use_qkv_bias": "attention_bias",
        "qk_layernorm": "head_norms",
        "use_parallel_residual": "parallel",
        "hidden_dropout": "residual_dropout",
    }

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> "StableLMConfig":
        values = hugging_face.read_config(fields, cls)
        if values["head_size"]:
            raise UserError(
                f"head_dim {values['head_size']} is not supported: it must be hidden_size / "
                "num_attention_heads"
            )
        return cls(**values)

    def to_hugging_face(self) -> dict:
        if self.head_size and self.head_size * self.heads != self.hidden_size:
            raise UserError(
                f"head_size {self.head_size} is not supported by transformers for stablelm: it "
                "must be hidden_size / heads"
            )
        values = hugging_face.write_config(self, "stablelm")
        del values["head_dim"]
        return values


class Block(llama.Block):
    kernel_masks = True

    def __init__(self, config: StableLMConfig, index: int):
        super().__init__(config, index)
        self.parallel = config.parallel
        if self.parallel:
            del self.mlp_norm
        self.mlp_dropout = Dropout(config.residual_dropout)

    def attention_settings(self, config: StableLMConfig, index: int) -> dict:
        c, settings = config, {"output_bias": False}
        if not c.head_norms:
            return settings
        size = c.head_size or c.hidden_size // c.heads
        query_unit, key_unit, _ = units_of_heads(c.heads, c.kv_heads, 1)
        return settings | {
            "q_norm": LayerNormPerHead(c.heads, size, query_unit, c.norm_epsilon, bias=False),
            "k_norm": LayerNormPerHead(c.kv_heads, size, key_unit, c.norm_epsilon, bias=False),
        }

    def forward(
        self, x: torch.Tensor, batch: MicroBatch, rotary: CosAndSin, mask: torch.Tensor | None
    ) -> torch.Tensor:
        seed, normed = batch.dropout_seed, self.attention_norm(x)
        x = x + self.attention(normed, seed, rotary, mask, batch.cache)
        if not self.parallel:
            normed = self.mlp_norm(x)
        return x + self.mlp_dropout(self.mlp(normed), seed)


PUBLISHED = {
    "stablelm-3b": Published("stabilityai/stablelm-3b-4e1t"),
    "stablelm2-1.6b": Published("stabilityai/stablelm-2-1_6b"),
    "stablelm2-12b": Published("stabilityai/stablelm-2-12b"),
}


@register("stablelm")
class StableLM(llama.Llama):
    Config, Block = StableLMConfig, Block
    HUGGING_FACE_NAMES = NAMES
    HUGGING_FACE = llama.HUGGING_FACE._replace(class_name="StableLm")
    presets = {
        # vocab_size, max_positions, hidden_size, layers, heads, kv_heads, head_size, ffn_size
        "stablelm-tiny": StableLMConfig(257, 256, 128, 4, 4, 2, 0, 384),
        "stablelm-3b": StableLMConfig(),
        "stablelm2-1.6b": StableLMConfig(
            100352, 4096, 2048, 24, 32, 32, 0, 5632, attention_bias=True
        ),
        "stablelm2-12b": StableLMConfig(
            100352, 4096, 5120, 40, 32, 8, 0, 13824, head_norms=True, parallel=True
        ),
    }
