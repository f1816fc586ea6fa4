"""Gemma 2's shape (Gemma Team 2024): a LLaMA with soft-capped scores and logits, norms before and
after each sublayer that multiply by 1 + weight, scaled embeddings, and a window in every other
layer."""

from dataclasses import dataclass

import torch

import megazoo
from megazoo.layers import Layer, RMSNorm
from megazoo.layers.norm import rms_norm
from megazoo.models import HFNames, llama
from megazoo.models.hugging_face import llama as hugging_face
from megazoo.models.masks import mask_of
from megazoo.parallel.shard import ParameterSpec


@dataclass(frozen=True)
class GemmaConfig(llama.LlamaFamilyConfig):
    head_size: int = 256
    activation: str = "gelu_pytorch_tanh"
    tie_embeddings: bool = True
    window: int = 4096  # of the layers of even numbers
    query_scalar: int = 256  # the scores are divided by its root
    score_cap: float | None = 50.0
    logit_cap: float | None = 30.0

    OWN_FIELDS = {
        "sliding_window": "window",
        "query_pre_attn_scalar": "query_scalar",
        "attn_logit_softcapping": "score_cap",
        "final_logit_softcapping": "logit_cap",
        "hidden_activation": "activation",
    }

    @classmethod
    def from_hugging_face(cls, fields):
        own = fields.renamed(cls.OWN_FIELDS, cls)
        layers = range(fields.values["num_hidden_layers"])
        fields.only("layer_types", [cls.kind(index) for index in layers])
        fields.only("use_bidirectional_attention", False)
        fields.only("attention_bias", False)
        return cls(**hugging_face.read_config(fields, cls) | own)

    def to_hugging_face(self) -> dict:
        written = hugging_face.write_config(self, "gemma2")
        written |= {theirs: getattr(self, ours) for theirs, ours in self.OWN_FIELDS.items()}
        del written["hidden_act"]
        return written | {"layer_types": [self.kind(index) for index in range(self.layers)]}

    @staticmethod
    def kind(index: int) -> str:
        return "full_attention" if index % 2 else "sliding_attention"


class OffsetNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in fp32."""

    def __init__(self, size: int, eps: float):
        Layer.__init__(self)
        self.eps = eps
        self.add_parameter("weight", ParameterSpec((size,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = 1 + self.synced_parameter("weight").float()
        return rms_norm(x.float(), weight, self.eps).to(x.dtype)


class Block(llama.Block):
    kernel_masks = True

    def __init__(self, config: GemmaConfig, index: int):
        super().__init__(config, index)
        for name in ("attention_norm", "after_attention", "mlp_norm", "after_mlp"):
            setattr(self, name, OffsetNorm(config.hidden_size, config.norm_epsilon))

    def attention_settings(self, config: GemmaConfig, index: int) -> dict:
        window = None if index % 2 else config.window
        scale = config.query_scalar**-0.5
        return {"window": window, "scale": scale, "soft_cap": config.score_cap}

    def forward(self, x, batch, rotary, mask):
        normed = self.attention_norm(x)
        attended = self.attention(normed, batch.dropout_seed, rotary, mask, batch.cache)
        x = x + self.after_attention(attended)
        return x + self.after_mlp(self.mlp(self.mlp_norm(x)))


@megazoo.register("gemma2")
class Gemma(llama.Llama):
    Config, Block = GemmaConfig, Block
    presets = {
        "gemma2-tiny": GemmaConfig(
            vocab_size=61, max_positions=32, hidden_size=32, layers=4, heads=4, kv_heads=2,
            ffn_size=48, head_size=12, window=6, query_scalar=10, score_cap=2.0, logit_cap=1.5,
        )
    }  # fmt: skip
    HUGGING_FACE_NAMES = llama.Llama.HUGGING_FACE_NAMES | {
        f"layers.{{}}.{ours}": HFNames(f"model.layers.{{}}.{theirs}_layernorm")
        for ours, theirs in {
            "attention_norm": "input",
            "after_attention": "post_attention",
            "mlp_norm": "pre_feedforward",
            "after_mlp": "post_feedforward",
        }.items()
    }

    def __init__(self, config: GemmaConfig, ctx, seed: int = 0):
        super().__init__(config, ctx, seed)
        if self.has_last:
            self.norm = OffsetNorm(config.hidden_size, config.norm_epsilon)

    def add_head(self) -> None:
        super().add_head(soft_cap=self.config.logit_cap)

    def forward_stage(self, x, batch, stage):
        if stage.first:
            x = self.embedding(x)
            x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype, device=x.device)
        rotary = self.rotary(batch.positions(x.device), x.dtype, batch.longest)
        mask = mask_of(batch, self.layers, x.dtype)
        x = self.run_layers(x, stage, batch, rotary, mask)
        return self.norm(x) if stage.last else x
