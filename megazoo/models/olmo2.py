"""OLMo 2 (OLMo Team 2025): LLaMA with norms after attention and MLP instead of before them, and
with normalised queries and keys.

    x = embedding(ids)                                              first stage
    x = x + attention_norm(attention(x))                            each layer
    x = x + mlp_norm(down(activation(gate(x)) * up(x)))
    logits = norm(x) @ head.weight^T                                last stage

Queries are normalised over all heads together, and keys too. Tensor parallelism shards the weights
of these norms by heads. All norms multiply by their weight in fp32. All other parts are as in
llama.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from megazoo.engine.microbatch import MicroBatch
from megazoo.families.names import HFNames
from megazoo.families.published import Published
from megazoo.families.registry import register
from megazoo.layers import HeadwiseRMSNorm, RMSNorm, units_of_heads
from megazoo.layers.fused import CosAndSin
from megazoo.layers.norm import rms_norm
from megazoo.lazy import LazyModule
from megazoo.models import llama

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.llama")

NAMES = llama.NAMES | {
    "layers.{}.attention_norm": HFNames("model.layers.{}.post_attention_layernorm"),
    "layers.{}.mlp_norm": HFNames("model.layers.{}.post_feedforward_layernorm"),
    "layers.{}.attention.q_norm": HFNames("model.layers.{}.self_attn.q_norm"),
    "layers.{}.attention.k_norm": HFNames("model.layers.{}.self_attn.k_norm"),
}


class OlmoNorm(RMSNorm):
    """RMSNorm that multiplies by the weight in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.use("weight").float()
        return rms_norm(x.float(), weight, self.eps).to(x.dtype)


@dataclass(frozen=True)
class Olmo2Config(llama.LlamaFamilyConfig):
    """Configure an OLMo 2. The defaults are those of transformers."""

    vocab_size: int = 50304
    norm_epsilon: float = 1e-5
    attention_bias: bool = False  # on qkv and output
    norm = OlmoNorm

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> Self:
        return cls(**hugging_face.read_config(fields, cls))

    def to_hugging_face(self) -> dict:
        return hugging_face.write_config(self, "olmo2")


def norms_of_heads(config: Any) -> dict[str, Any]:
    """Return the arguments of CausalSelfAttention that normalise queries, and keys, over all heads
    together."""
    c, size = config, config.head_size or config.hidden_size // config.heads
    query_unit, key_unit, _ = units_of_heads(c.heads, c.kv_heads, size)
    return {
        "q_norm": HeadwiseRMSNorm(c.heads * size, query_unit, c.norm_epsilon),
        "k_norm": HeadwiseRMSNorm(c.kv_heads * size, key_unit, c.norm_epsilon),
    }


class Block(llama.Block):
    kernel_masks = True

    def attention_settings(self, config: Olmo2Config, index: int) -> dict:
        return norms_of_heads(config)

    def forward(
        self, x: torch.Tensor, batch: MicroBatch, rotary: CosAndSin, mask: torch.Tensor | None
    ) -> torch.Tensor:
        attended = self.attention(x, batch.dropout_seed, rotary, mask, batch.cache)
        x = x + self.attention_norm(attended)
        return x + self.mlp_norm(self.mlp(x))


# OLMo Team 2025, table 3.
PUBLISHED = {
    "olmo2-1b": Published("allenai/OLMo-2-0425-1B"),
    "olmo2-7b": Published("allenai/OLMo-2-1124-7B", 3e-4, 1024 * 4096),
    "olmo2-13b": Published("allenai/OLMo-2-1124-13B", 9e-4, 2048 * 4096),
    "olmo2-32b": Published("allenai/OLMo-2-0325-32B", 6e-4, 2048 * 4096),
}


@register("olmo2")
class Olmo2(llama.Llama):
    Config, Block = Olmo2Config, Block
    HUGGING_FACE_NAMES = NAMES
    presets = {
        # vocab_size, max_positions, hidden_size, layers, heads, kv_heads, head_size, ffn_size
        "olmo2-tiny": Olmo2Config(257, 256, 128, 4, 4, 2, 0, 384),
        "olmo2-1b": Olmo2Config(
            100352, 4096, 2048, 16, 16, 16, 0, 8192, norm_epsilon=1e-6, rope_theta=5e5
        ),
        "olmo2-7b": Olmo2Config(
            100352, 4096, 4096, 32, 32, 32, 0, 11008, norm_epsilon=1e-6, rope_theta=5e5
        ),
        "olmo2-13b": Olmo2Config(
            100352, 4096, 5120, 40, 40, 40, 0, 13824, norm_epsilon=1e-6, rope_theta=5e5
        ),
        "olmo2-32b": Olmo2Config(
            100352, 4096, 5120, 64, 40, 8, 0, 27648, norm_epsilon=1e-6, rope_theta=5e5
        ),
    }
