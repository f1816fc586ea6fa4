"""Gemma 3 (Gemma Team 2025), the models for text: Gemma 2 with normalised queries and keys instead
of soft-capped scores, and windows in five of six layers.

Layers with a window rotate queries and keys with another base (window_theta); only the
others have the scaling for longer contexts. All other parts are as in gemma2.py.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from megazoo.families.names import HFNames
from megazoo.families.published import Published
from megazoo.families.registry import register
from megazoo.lazy import LazyModule
from megazoo.models import gemma2, windows
from megazoo.models.gemma2 import GemmaNorm

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.llama")


@dataclass(frozen=True)
class Gemma3Config(gemma2.Gemma2Config):
    """Configure a Gemma 3. The defaults are those of transformers."""

    vocab_size: int = 262208
    max_positions: int = 131072
    rope_theta: float = 1e6
    window_theta: float = 1e4  # rope_theta of the layers with a window
    full_every: int = 6
    score_cap: float | None = None
    logit_cap: float | None = None

    MODEL_TYPE: ClassVar = "gemma3_text"

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> Self:
        fields.only("attn_logit_softcapping", None)  # transformers ignores it
        rotary = hugging_face.read_rotary_by_layer(fields, cls.rope_theta, cls.window_theta)
        return replace(super().from_hugging_face(fields), **rotary)

    def to_hugging_face(self) -> dict:
        values = super().to_hugging_face() | hugging_face.write_rotary_by_layer(self)
        if self.num_labels:  # the class without Text is multimodal
            values["architectures"] = ["Gemma3TextForSequenceClassification"]
        return values


class Block(windows.WindowBlock, gemma2.Block):
    kernel_masks = True

    def attention_settings(self, config: Gemma3Config, index: int) -> dict:
        settings = super().attention_settings(config, index)
        self.has_window = settings["window"] is not None
        norms = [GemmaNorm(config.head_size, config.norm_epsilon, parallel=True) for _ in "qk"]
        return settings | {"q_norm": norms[0], "k_norm": norms[1]}


PUBLISHED = {
    "gemma3-270m": Published("google/gemma-3-270m"),
    "gemma3-1b": Published("google/gemma-3-1b-pt"),
}


@register("gemma3")
class Gemma3(windows.WindowLlama, gemma2.Gemma2):
    Config, Block = Gemma3Config, Block
    HUGGING_FACE_NAMES = gemma2.NAMES | {
        "layers.{}.attention.q_norm": HFNames("model.layers.{}.self_attn.q_norm"),
        "layers.{}.attention.k_norm": HFNames("model.layers.{}.self_attn.k_norm"),
    }
    HUGGING_FACE = gemma2.Gemma2.HUGGING_FACE._replace(model_type="gemma3_text")
    presets = {
        "gemma3-tiny": Gemma3Config(
            257, 256, 128, 6, 4, 1, 32, 384, window=48, query_scalar=32
        ),
        "gemma3-270m": Gemma3Config(262144, 32768, 640, 18, 4, 1, ffn_size=2048, window=512),
        "gemma3-1b": Gemma3Config(262144, 32768, 1152, 26, 4, 1, ffn_size=6912, window=512),
    }  # fmt: skip
