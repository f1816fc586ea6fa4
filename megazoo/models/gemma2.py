"""Gemma 2 (Gemma Team 2024): LLaMA with norms before and after attention and MLP, soft-capped
scores and logits, and windows in every second layer.

    x = embedding(ids) * sqrt(hidden size)                          first stage
    x = x + after_attention(attention(attention_norm(x)))           each layer
    x = x + after_mlp(mlp(mlp_norm(x)))
    logits = cap * tanh(norm(x) @ embedding.weight^T / cap)         last stage

All norms multiply by 1 + weight. Scores are divided by the root of query_scalar. Other
parts are as in llama.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from megazoo.engine.microbatch import MicroBatch, static_steps
from megazoo.families.names import HFNames
from megazoo.families.published import Published
from megazoo.families.registry import register
from megazoo.layers import Layer, RMSNorm
from megazoo.layers.fused import CosAndSin
from megazoo.layers.norm import rms_norm
from megazoo.lazy import LazyModule
from megazoo.models import llama
from megazoo.parallel.shard import ParameterSpec, Shard

if TYPE_CHECKING:
    from megazoo.formats.hugging_face.config import ConfigReader

hugging_face = LazyModule("megazoo.formats.hugging_face.llama")
window_files = LazyModule("megazoo.formats.hugging_face.windows")

NAMES = llama.NAMES | {
    f"layers.{{}}.{name}": HFNames(f"model.layers.{{}}.{hf_name}_layernorm")
    for name, hf_name in {
        "attention_norm": "input",
        "after_attention": "post_attention",
        "mlp_norm": "pre_feedforward",
        "after_mlp": "post_feedforward",
    }.items()
}


class GemmaNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in fp32.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the mean square.
        parallel: as in RMSNorm.
    """

    shown = ("eps",)

    def __init__(self, hidden_size: int, eps: float, *, parallel: bool = False):
        Layer.__init__(self)
        self.eps = eps
        shard = Shard(0, (hidden_size,), (hidden_size,)) if parallel else None
        self.add_parameter("weight", ParameterSpec((hidden_size,), shard))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = 1 + self.use("weight").float()
        return rms_norm(x.float(), weight, self.eps).to(x.dtype)


@dataclass(frozen=True)
class Gemma2Config(llama.LlamaFamilyConfig):
    """Configure a Gemma 2. The defaults are those of transformers."""

    vocab_size: int = 256000
    max_positions: int = 8192
    hidden_size: int = 2304
    layers: int = 26
    heads: int = 8
    kv_heads: int = 4
    head_size: int = 256
    ffn_size: int = 9216
    activation: str = "gelu_pytorch_tanh"
    tie_embeddings: bool = True
    attention_bias: bool = False  # on qkv and output
    window: int = 4096  # tokens that a query attends to, itself included; 0: all before it
    full_every: int = 2  # every such layer attends to all tokens, the others have the window
    query_scalar: int = 256  # the scores are divided by its root
    score_cap: float | None = 50.0
    logit_cap: float | None = 30.0
    norm = GemmaNorm

    FIELDS: ClassVar = {
        "query_pre_attn_scalar": "query_scalar",
        "attn_logit_softcapping": "score_cap",
        "final_logit_softcapping": "logit_cap",
        "hidden_activation": "activation",
    }
    MODEL_TYPE: ClassVar = "gemma2"

    @classmethod
    def from_hugging_face(cls, fields: "ConfigReader") -> Self:
        values = hugging_face.read_config(fields, cls)
        fields.only("use_bidirectional_attention", False)
        fields.take("cache_implementation")  # has no effect on the result
        window = window_files.read_layer_pattern(
            fields, values["layers"], cls.window, cls.full_every
        )
        own = fields.renamed(cls.FIELDS, cls)
        off: dict[str, Any] = {
            o: None for t, o in cls.FIELDS.items() if o.endswith("cap") and t in fields.nulls
        }
        return cls(**values | window | own | off)

    def to_hugging_face(self) -> dict:
        values = hugging_face.write_config(self, self.MODEL_TYPE)
        del values["hidden_act"]
        own = {theirs: getattr(self, ours) for theirs, ours in self.FIELDS.items()}
        return values | own | window_files.write_layer_pattern(self)


class Block(llama.Block):
    kernel_masks = True

    def __init__(self, config: Gemma2Config, index: int):
        super().__init__(config, index)
        size, eps = config.hidden_size, config.norm_epsilon
        self.after_attention, self.after_mlp = GemmaNorm(size, eps), GemmaNorm(size, eps)

    def attention_settings(self, config: Gemma2Config, index: int) -> dict:
        window = 0 if (index + 1) % config.full_every == 0 else config.window
        scale = config.query_scalar**-0.5
        return {"window": window or None, "scale": scale, "soft_cap": config.score_cap}

    def forward(
        self, x: torch.Tensor, batch: MicroBatch, rotary: CosAndSin, mask: torch.Tensor | None
    ) -> torch.Tensor:
        normed = self.attention_norm(x)
        attended = self.attention(normed, batch.dropout_seed, rotary, mask, batch.cache)
        x = x + self.after_attention(attended)
        return x + self.after_mlp(self.mlp(self.mlp_norm(x)))


PUBLISHED = {
    "gemma2-2b": Published("google/gemma-2-2b"),
    "gemma2-9b": Published("google/gemma-2-9b"),
    "gemma2-27b": Published("google/gemma-2-27b"),
}


@register("gemma2")
class Gemma2(llama.Llama):
    Config, Block = Gemma2Config, Block
    HUGGING_FACE_NAMES = NAMES
    presets = {
        "gemma2-tiny": Gemma2Config(
            257, 256, 128, 4, 4, 2, 32, 384, window=48, query_scalar=32
        ),
        "gemma2-2b": Gemma2Config(),
        "gemma2-9b": Gemma2Config(
            hidden_size=3584, layers=42, heads=16, kv_heads=8, ffn_size=14336
        ),
        "gemma2-27b": Gemma2Config(
            hidden_size=4608, layers=46, heads=32, kv_heads=16, head_size=128, ffn_size=36864,
            query_scalar=144,
        ),
    }  # fmt: skip

    def add_head(self) -> None:
        super().add_head(soft_cap=self.config.logit_cap)

    @static_steps
    def embed(self, ids: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        x = self.embedding(ids)
        return x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype, device=x.device)
