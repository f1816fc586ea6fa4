"""Qwen2 and Qwen2.5 (Yang et al. 2024): LLaMA with biases on queries, keys and values.

Everything else is as in llama.py. Layers after the first `full_layers` can have a window; the
published models have none.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megazoo.families.published import Published
from megazoo.families.registry import register
from megazoo.lazy import LazyModule
from megazoo.models import llama

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.llama")
window_files = LazyModule("megazoo.formats.hugging_face.windows")


@dataclass(frozen=True)
class Qwen2Config(llama.LlamaFamilyConfig):
    """Configure a Qwen2. The defaults are those of transformers."""

    vocab_size: int = 151936
    max_positions: int = 32768
    kv_heads: int = 32  # 0: as many as heads
    ffn_size: int = 22016
    window: int = 0  # tokens that a query attends to, itself included; 0: all before it
    full_layers: int = 0  # number of first layers that have no window
    attention_bias = True  # on qkv

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> "Qwen2Config":
        values = hugging_face.read_config(fields, cls)
        return cls(**values, **window_files.read_layer_types(fields, values["layers"]))

    def to_hugging_face(self) -> dict:
        return hugging_face.write_config(self, "qwen2") | window_files.write_layer_types(self)


class Block(llama.Block):
    def attention_settings(self, config: Qwen2Config, index: int) -> dict:
        window = config.window if index >= config.full_layers else 0
        return {"window": window or None, "output_bias": False}


def _published(*sizes: Any, **more: Any) -> Qwen2Config:
    """Return a published config. sizes: from vocab_size to ffn_size, in the order of the fields."""
    return Qwen2Config(*sizes, rope_theta=1e6, **more)


PUBLISHED = {
    "qwen2-0.5b": Published("Qwen/Qwen2-0.5B"),
    "qwen2-1.5b": Published("Qwen/Qwen2-1.5B"),
    "qwen2-7b": Published("Qwen/Qwen2-7B"),
    "qwen2-72b": Published("Qwen/Qwen2-72B"),
    "qwen2.5-3b": Published("Qwen/Qwen2.5-3B"),
    "qwen2.5-32b": Published("Qwen/Qwen2.5-32B"),
}


@register("qwen2")
class Qwen2(llama.Llama):
    Config, Block = Qwen2Config, Block
    presets = {
        "qwen2-tiny": Qwen2Config(257, 256, 128, 4, 4, 2, 0, 384, tie_embeddings=True),
        "qwen2-0.5b": _published(151936, 131072, 896, 24, 14, 2, 0, 4864, tie_embeddings=True),
        "qwen2-1.5b": _published(151936, 131072, 1536, 28, 12, 2, 0, 8960, tie_embeddings=True),
        "qwen2-7b": _published(152064, 131072, 3584, 28, 28, 4, 0, 18944),
        "qwen2-72b": _published(152064, 131072, 8192, 80, 64, 8, 0, 29568),
        "qwen2.5-3b": _published(151936, 32768, 2048, 36, 16, 2, 0, 11008, tie_embeddings=True),
        "qwen2.5-32b": _published(152064, 131072, 5120, 64, 40, 8, 0, 27648, norm_epsilon=1e-5),
    }
