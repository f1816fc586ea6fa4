"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): Qwen2 with experts instead of the MLP.

One more expert is shared: all tokens use it, and its result is multiplied by
sigmoid(shared_gate(x)). See experts.py; all other parts are as in qwen2.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megazoo.errors import UserError
from megazoo.families.published import Published
from megazoo.families.registry import register
from megazoo.lazy import LazyModule
from megazoo.models import experts, llama, qwen2

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.llama")
expert_files = LazyModule("megazoo.formats.hugging_face.experts")
window_files = LazyModule("megazoo.formats.hugging_face.windows")

FIELDS = expert_files.QWEN_FIELDS | {"shared_expert_intermediate_size": "shared_size"}


@dataclass(frozen=True)
class Qwen2MoeConfig(experts.ExpertsFields, qwen2.Qwen2Config):
    """Configure a Qwen2-MoE. The defaults are those of transformers."""

    hidden_size: int = 2048
    layers: int = 24
    heads: int = 16
    kv_heads: int = 16
    ffn_size: int = 5632  # of layers without experts
    experts: int = 60
    experts_per_token: int = 4
    expert_size: int = 1408
    normalize_weights: bool = False
    shared_size: int = 5632

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> "Qwen2MoeConfig":
        values = hugging_face.read_config(fields, cls)
        fields.only("qkv_bias", True)
        fields.only("use_sliding_window", False)
        fields.only("layer_types", window_files.layer_types(values["layers"], values["layers"]))
        for name in ("sliding_window", "max_window_layers"):
            fields.take(name)  # has no effect
        return cls(**values, **expert_files.read_experts(fields, cls, ("num_experts",), FIELDS))

    def to_hugging_face(self) -> dict:
        if self.window:
            raise UserError(
                f"window {self.window} is not supported for qwen2_moe in Hugging Face directories: "
                "use 0, or shards"
            )
        values = hugging_face.write_config(self, "qwen2_moe")
        return values | expert_files.write_experts(self, "num_experts", FIELDS)


class Block(experts.Block, qwen2.Block):
    kernel_masks = True


PUBLISHED = {
    "qwen1.5-moe-a2.7b": Published("Qwen/Qwen1.5-MoE-A2.7B"),
    "qwen2-57b-a14b": Published("Qwen/Qwen2-57B-A14B"),
}


@register("qwen2_moe")
class Qwen2Moe(llama.Llama):
    Config, Block = Qwen2MoeConfig, Block
    HUGGING_FACE_NAMES: ClassVar = llama.NAMES | experts.NAMES | experts.SHARED_NAMES
    presets = {
        "qwen2_moe-tiny": Qwen2MoeConfig(
            257, 256, 128, 4, 4, 2, 0, 384, experts=6, experts_per_token=2, expert_size=96,
            shared_size=192,
        ),
        "qwen1.5-moe-a2.7b": Qwen2MoeConfig(max_positions=8192, rope_theta=1e6),
        "qwen2-57b-a14b": Qwen2MoeConfig(
            max_positions=131072, hidden_size=3584, layers=28, heads=28, kv_heads=4, ffn_size=18944,
            rope_theta=1e6, experts=64, experts_per_token=8, expert_size=2560, shared_size=20480,
        ),
    }  # fmt: skip
