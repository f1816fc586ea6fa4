"""Qwen3-MoE (Yang et al. 2025): Qwen3 with experts instead of the MLP.

See experts.py; all other parts are as in qwen3.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megazoo.errors import UserError
from megazoo.families.published import Published
from megazoo.families.registry import register
from megazoo.lazy import LazyModule
from megazoo.models import experts, llama, qwen3

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.llama")
expert_files = LazyModule("megazoo.formats.hugging_face.experts")
window_files = LazyModule("megazoo.formats.hugging_face.windows")

FIELDS = expert_files.QWEN_FIELDS
COUNTS = ("num_experts", "num_local_experts")


@dataclass(frozen=True)
class Qwen3MoeConfig(experts.ExpertsFields, qwen3.Qwen3Config):
    """Configure a Qwen3-MoE. The defaults are those of transformers."""

    hidden_size: int = 2048
    layers: int = 24
    kv_heads: int = 4
    head_size: int = 0  # 0: hidden_size / heads
    ffn_size: int = 6144  # of layers without experts
    experts: int = 128
    experts_per_token: int = 8
    expert_size: int = 768
    normalize_weights: bool = False

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> "Qwen3MoeConfig":
        values = hugging_face.read_config(fields, cls)
        values |= expert_files.read_experts(fields, cls, COUNTS, FIELDS)
        return cls(**values, window=window_files.read_common_window(fields))

    def to_hugging_face(self) -> dict:
        values = hugging_face.write_config(self, "qwen3_moe")
        if self.full_layers and self.window:
            raise UserError(
                f"full_layers {self.full_layers} is not supported by transformers for qwen3_moe: "
                "use 0"
            )
        window = {"use_sliding_window": bool(self.window), "sliding_window": self.window or None}
        return values | expert_files.write_experts(self, COUNTS[0], FIELDS) | window


class Block(experts.Block, qwen3.Block):
    kernel_masks = True


PUBLISHED = {
    "qwen3-30b-a3b": Published("Qwen/Qwen3-30B-A3B"),
    "qwen3-235b-a22b": Published("Qwen/Qwen3-235B-A22B"),
}


@register("qwen3_moe")
class Qwen3Moe(llama.Llama):
    Config, Block = Qwen3MoeConfig, Block
    HUGGING_FACE_NAMES: ClassVar = qwen3.NAMES | experts.NAMES
    presets = {
        "qwen3_moe-tiny": Qwen3MoeConfig(
            257, 256, 128, 4, 4, 2, 48, 384, experts=8, experts_per_token=2, expert_size=96,
            normalize_weights=True,
        ),
        "qwen3-30b-a3b": Qwen3MoeConfig(
            max_positions=40960, layers=48, head_size=128, rope_theta=1e6, normalize_weights=True
        ),
        "qwen3-235b-a22b": Qwen3MoeConfig(
            max_positions=40960, hidden_size=4096, layers=94, heads=64, head_size=128,
            ffn_size=12288, rope_theta=1e6, expert_size=1536, normalize_weights=True,
        ),
    }  # fmt: skip
