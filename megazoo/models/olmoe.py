"""OLMoE (Muennighoff et al. 2024): LLaMA with experts instead of the MLP, and with normalised
queries and keys.

Queries are normalised over all heads together, and keys too, as in olmo2.py. See experts.py;
all other parts are as in llama.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megazoo.errors import UserError
from megazoo.families.names import HFNames
from megazoo.families.published import Published
from megazoo.families.registry import register
from megazoo.lazy import LazyModule
from megazoo.models import experts, llama, olmo2

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.llama")
expert_files = LazyModule("megazoo.formats.hugging_face.experts")

FIELDS = {"norm_topk_prob": "normalize_weights"}
COUNTS = ("num_experts", "num_local_experts")
NAMES = llama.NAMES | {
    "layers.{}.attention.q_norm": HFNames("model.layers.{}.self_attn.q_norm"),
    "layers.{}.attention.k_norm": HFNames("model.layers.{}.self_attn.k_norm"),
}


@dataclass(frozen=True)
class OlmoeConfig(experts.ExpertsFields, llama.LlamaFamilyConfig):
    """Configure an OLMoE. The defaults are those of transformers."""

    vocab_size: int = 50304
    max_positions: int = 4096
    hidden_size: int = 2048
    layers: int = 16
    heads: int = 16
    ffn_size: int = 2048  # of an expert
    norm_epsilon: float = 1e-5
    attention_bias: bool = False  # on qkv and output
    experts: int = 64
    experts_per_token: int = 8
    normalize_weights: bool = False
    router_aux_loss_coef: float = 0.01

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> "OlmoeConfig":
        values = hugging_face.read_config(fields, cls)
        fields.only("clip_qkv", None)
        if values["head_size"]:
            raise UserError(
                f"head_dim {values['head_size']} is not supported: it must be hidden_size / "
                "num_attention_heads"
            )
        return cls(**values, **expert_files.read_experts(fields, cls, COUNTS, FIELDS))

    def to_hugging_face(self) -> dict:
        if self.num_labels:
            raise UserError(
                f"num_labels {self.num_labels} is not supported by transformers for olmoe: use "
                "shards"
            )
        values = hugging_face.write_config(self, "olmoe")
        return values | expert_files.write_experts(self, COUNTS[0], FIELDS)


class Block(experts.Block):
    kernel_masks = True

    def attention_settings(self, config: OlmoeConfig, index: int) -> dict:
        return olmo2.norms_of_heads(config)


# Muennighoff et al. 2024.
PUBLISHED = {
    "olmoe-1b-7b": Published("allenai/OLMoE-1B-7B-0924", 4e-4, 1024 * 4096),
}


@register("olmoe")
class Olmoe(llama.Llama):
    Config, Block = OlmoeConfig, Block
    HUGGING_FACE_NAMES: ClassVar = NAMES | experts.NAMES
    presets = {
        "olmoe-tiny": OlmoeConfig(
            257, 256, 128, 4, 4, ffn_size=96, experts=8, experts_per_token=2
        ),
        "olmoe-1b-7b": OlmoeConfig(ffn_size=1024),
    }  # fmt: skip
