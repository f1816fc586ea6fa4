"""Mistral (Jiang et al. 2023): LLaMA with sliding-window attention.

Everything else is as in llama.py. Version 0.1 has windows; later versions attend to all tokens.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megazoo.families.published import Published
from megazoo.families.registry import register
from megazoo.lazy import LazyModule
from megazoo.models import llama

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.llama")
window_files = LazyModule("megazoo.formats.hugging_face.windows")


@dataclass(frozen=True)
class MistralConfig(llama.LlamaFamilyConfig):
    """Configure a Mistral. The defaults are those of transformers."""

    max_positions: int = 131072
    kv_heads: int = 8  # 0: as many as heads
    ffn_size: int = 14336
    window: int = 4096  # tokens that a query attends to, itself included; 0: all before it

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> "MistralConfig":
        values = hugging_face.read_config(fields, cls)
        return cls(**values, window=window_files.read_window(fields, cls.window))

    def to_hugging_face(self) -> dict:
        config = hugging_face.write_config(self, "mistral")
        return {**config, "sliding_window": self.window or None}


class Block(llama.Block):
    def attention_settings(self, config: MistralConfig, index: int) -> dict:
        return {"window": config.window or None}


PUBLISHED = {
    "mistral-7b-v0.1": Published("mistralai/Mistral-7B-v0.1"),
    "mistral-7b-v0.3": Published("mistralai/Mistral-7B-v0.3"),
    "mistral-nemo-12b": Published("mistralai/Mistral-Nemo-Base-2407"),
    "mistral-small-24b": Published("mistralai/Mistral-Small-24B-Base-2501"),
}


@register("mistral")
class Mistral(llama.Llama):
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
