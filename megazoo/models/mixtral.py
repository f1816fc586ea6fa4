"""Mixtral (Jiang et al. 2024): Mistral with experts instead of the MLP.

The router chooses 2 of 8 experts for each token, and divides their weights by their sum: see
experts.py. All other parts are as in mistral.py. The published models have no window.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megazoo.families.published import Published
from megazoo.families.registry import register
from megazoo.lazy import LazyModule
from megazoo.models import experts, llama, mistral

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.llama")
expert_files = LazyModule("megazoo.formats.hugging_face.experts")
window_files = LazyModule("megazoo.formats.hugging_face.windows")

COUNTS = ("num_local_experts", "num_experts")


@dataclass(frozen=True)
class MixtralConfig(experts.ExpertsFields, mistral.MistralConfig):
    """Configure a Mixtral. The defaults are those of transformers."""

    norm_epsilon: float = 1e-5
    rope_theta: float = 1e6
    window: int = 0  # tokens that a query attends to, itself included; 0: all before it

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> "MixtralConfig":
        values = hugging_face.read_config(fields, cls)
        fields.only("router_jitter_noise", 0.0)
        window = window_files.read_window(fields, 0) if "sliding_window" in fields.values else 0
        values |= expert_files.read_experts(fields, cls, COUNTS, {})
        return cls(**values, window=window)

    def to_hugging_face(self) -> dict:
        config = hugging_face.write_config(self, "mixtral")
        own = expert_files.write_experts(self, COUNTS[0], {})
        return {**config, **own, "sliding_window": self.window or None}


class Block(experts.Block, mistral.Block):
    kernel_masks = True


PUBLISHED = {
    "mixtral-8x7b": Published("mistralai/Mixtral-8x7B-v0.1"),
    "mixtral-8x22b": Published("mistralai/Mixtral-8x22B-v0.1"),
}


@register("mixtral")
class Mixtral(llama.Llama):
    Config, Block = MixtralConfig, Block
    HUGGING_FACE_NAMES: ClassVar = llama.NAMES | experts.MIXTRAL_NAMES
    presets = {
        "mixtral-tiny": MixtralConfig(
            vocab_size=257, max_positions=256, hidden_size=128, layers=4, heads=4, kv_heads=2,
            ffn_size=192, experts=4,
        ),
        "mixtral-8x7b": MixtralConfig(max_positions=32768, router_aux_loss_coef=0.02),
        "mixtral-8x22b": MixtralConfig(
            max_positions=65536, hidden_size=6144, layers=56, heads=48,
            ffn_size=16384,
        ),
    }  # fmt: skip
