"""Qwen2 and Qwen2.5 (Yang et al. 2024): a LLaMA with biases on queries, keys and values.

Everything else is as in llama.py. Layers after the first `full_layers` can have a window; the
published models have none.
"""

from dataclasses import dataclass

from megazoo.models import llama
from megazoo.models.hugging_face import llama as hugging_face
from megazoo.models.hugging_face.config import ConfigReader
from megazoo.models.hugging_face.windows import read_layer_types, write_layer_types
from megazoo.models.registry import register


@dataclass(frozen=True)
class Qwen2Config(llama.LlamaFamilyConfig):
    """The defaults are those of transformers."""

    vocab_size: int = 151936
    max_positions: int = 32768
    kv_heads: int = 32  # 0: as many as heads
    ffn_size: int = 22016
    window: int = 0  # tokens that a query attends to, itself included; 0: all before it
    full_layers: int = 0  # the first ones, which have no window
    attention_bias = True  # on qkv

    @classmethod
    def from_hugging_face(cls, fields: ConfigReader) -> "Qwen2Config":
        values = hugging_face.read_config(fields, cls)
        return cls(**values, **read_layer_types(fields, values["layers"]))

    def to_hugging_face(self) -> dict:
        return hugging_face.write_config(self, "qwen2") | write_layer_types(self)


class Block(llama.Block):
    def attention_settings(self, config: Qwen2Config, index: int) -> dict:
        window = config.window if index >= config.full_layers else 0
        return {"window": window or None, "output_bias": False}


@register("qwen2")
class Qwen2(llama.Llama):
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
