"""Qwen3 (Yang et al. 2025): a LLaMA whose queries and keys are normalised, head by head.

Every tensor-parallel rank has both norms, unsharded, and applies them to its own heads. Windows are
as in qwen2.py, everything else as in llama.py.
"""

from dataclasses import dataclass

from megazoo.families.names import HFNames
from megazoo.families.published import Published
from megazoo.families.registry import register
from megazoo.layers import RMSNorm
from megazoo.lazy import LazyModule
from megazoo.models import llama, qwen2

hugging_face = LazyModule("megazoo.formats.hugging_face.llama")
window_files = LazyModule("megazoo.formats.hugging_face.windows")

NAMES = llama.NAMES | {
    "layers.{}.attention.q_norm": HFNames("model.layers.{}.self_attn.q_norm"),
    "layers.{}.attention.k_norm": HFNames("model.layers.{}.self_attn.k_norm"),
}


@dataclass(frozen=True)
class Qwen3Config(qwen2.Qwen2Config):
    """The defaults are those of transformers."""

    head_size: int = 128  # 0: hidden_size / heads
    attention_bias: bool = False  # on qkv and output

    def to_hugging_face(self) -> dict:
        return hugging_face.write_config(self, "qwen3") | window_files.write_layer_types(self)


class Block(qwen2.Block):
    def attention_settings(self, config: Qwen3Config, index: int) -> dict:
        window = super().attention_settings(config, index)["window"]
        size = config.head_size or config.hidden_size // config.heads
        norms = [RMSNorm(size, config.norm_epsilon, parallel=True) for _ in "qk"]
        return {"q_norm": norms[0], "k_norm": norms[1], "window": window}


def _published(hidden: int, layers: int, heads: int, ffn: int, tied: bool = False) -> Qwen3Config:
    return Qwen3Config(
        max_positions=40960, hidden_size=hidden, layers=layers, heads=heads, kv_heads=8,
        ffn_size=ffn, rope_theta=1e6, tie_embeddings=tied,
    )  # fmt: skip


PUBLISHED = {
    "qwen3-0.6b": Published("Qwen/Qwen3-0.6B"),
    "qwen3-1.7b": Published("Qwen/Qwen3-1.7B"),
    "qwen3-4b": Published("Qwen/Qwen3-4B"),
    "qwen3-8b": Published("Qwen/Qwen3-8B"),
    "qwen3-14b": Published("Qwen/Qwen3-14B"),
    "qwen3-32b": Published("Qwen/Qwen3-32B"),
}


@register("qwen3")
class Qwen3(qwen2.Qwen2):
    Config, Block = Qwen3Config, Block
    HUGGING_FACE_NAMES = NAMES
    presets = {
        "qwen3-tiny": Qwen3Config(257, 256, 128, 4, 4, 2, 48, 384, tie_embeddings=True),
        "qwen3-0.6b": _published(1024, 28, 16, 3072, tied=True),
        "qwen3-1.7b": _published(2048, 28, 16, 6144, tied=True),
        "qwen3-4b": _published(2560, 36, 32, 9728, tied=True),
        "qwen3-8b": _published(4096, 36, 32, 12288),
        "qwen3-14b": _published(5120, 40, 40, 17408),
        "qwen3-32b": _published(5120, 64, 64, 25600),
    }
