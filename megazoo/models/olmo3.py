"""OLMo 3 (OLMo Team 2025): OLMo 2 with windows in three of four layers.

Only layers without a window have the scaling of the rotary embeddings for longer contexts. The
others rotate with the base window_theta. All other parts are as in olmo2.py.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from megazoo.families.published import Published
from megazoo.families.registry import register
from megazoo.lazy import LazyModule
from megazoo.models import olmo2, windows

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.llama")
window_files = LazyModule("megazoo.formats.hugging_face.windows")


@dataclass(frozen=True)
class Olmo3Config(olmo2.Olmo2Config):
    """Configure an OLMo 3. The defaults are those of transformers."""

    rope_theta: float = 5e5
    window_theta: float = 5e5  # rope_theta of the layers with a window
    window: int = 4096  # tokens that a query attends to, itself included; 0: all before it
    full_every: int = 4  # every such layer attends to all tokens, the others have the window

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> Self:
        rotary = hugging_face.read_rotary_by_layer(fields, cls.rope_theta, cls.window_theta)
        config = super().from_hugging_face(fields)
        pattern = window_files.read_layer_pattern(fields, config.layers, cls.window, cls.full_every)
        return replace(config, **rotary, **pattern)

    def to_hugging_face(self) -> dict:
        values = hugging_face.write_config(self, "olmo3") | window_files.write_layer_pattern(self)
        return values | hugging_face.write_rotary_by_layer(self)


class Block(windows.WindowBlock, olmo2.Block):
    kernel_masks = True

    def attention_settings(self, config: Olmo3Config, index: int) -> dict:
        self.has_window = bool((index + 1) % config.full_every)
        window = config.window if self.has_window else 0
        return super().attention_settings(config, index) | {"window": window or None}


YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 8192,
}


def _published(*sizes: Any) -> Olmo3Config:
    """Return a published config. sizes: from hidden_size to ffn_size, in the order of the
    fields."""
    return Olmo3Config(100278, 65536, *sizes, norm_epsilon=1e-6, rope_scaling=YARN)


PUBLISHED = {
    "olmo3-7b": Published("allenai/Olmo-3-1025-7B"),
    "olmo3-32b": Published("allenai/Olmo-3-1125-32B"),
}


@register("olmo3")
class Olmo3(windows.WindowLlama, olmo2.Olmo2):
    Config, Block = Olmo3Config, Block
    presets = {
        "olmo3-tiny": Olmo3Config(257, 256, 128, 4, 4, 2, 0, 384, window=48),
        "olmo3-7b": _published(4096, 32, 32, 32, 0, 11008),
        "olmo3-32b": _published(5120, 64, 40, 8, 0, 27648),
    }
