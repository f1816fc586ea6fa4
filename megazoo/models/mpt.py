"""MPT (MosaicML 2023) as llm-foundry means it: ALiBi or learned positions, pre-norm blocks, exact
GELU.

    x = dropout(embedding(ids) [+ position_embedding(positions)])   first stage; learned positions only without ALiBi
    x = x + dropout(attention(attention_norm(x)))                   each layer, the norms before, not after; ALiBi is
    x = x + dropout(down(gelu(up(mlp_norm(x)))))                    added to the attention scores
    logits = norm(x) @ embedding.weight^T [* logit_scale]           last stage; head.weight^T if it is not tied

Queries, keys and values can be clipped (clip_qkv), and then queries and keys normalised, each over
all heads (qk_norm), with an epsilon of 1e-5 whatever norm_epsilon is: llm-foundry does not hand its
norm_eps on to q_ln and k_ln.

Attention is causal; segments (packed documents, and padding as one more) hide further tokens from
each other. Weights [outputs, inputs] and where tensor parallelism cuts them:
    embedding, head   rows: the vocabulary            attention.qkv      rows: whole heads of each of q, k, v
    mlp.up            rows: inner features            attention.output   columns: whole heads
    mlp.down          columns: inner features         attention.q_norm, k_norm: whole heads
    position_embedding, the other norms, biases of output and down: not cut
A rank adds the ALiBi slopes of its own heads. KV heads go with their queries; where tp exceeds
their number, several ranks hold the same one. Biases of qkv and up, if any, are cut like their
rows. Embedding and head are tied by default: one parameter where one stage has both, else two
copies, on the first stage and the last, that stay equal.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError
from megazoo.layers import (
    MLP,
    CausalSelfAttention,
    ClassificationHead,
    Dropout,
    HeadwiseLayerNorm,
    LayerNorm,
    PositionEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    alibi_bias,
    alibi_slopes,
    segment_mask,
    units_of_heads,
)
from megazoo.models.base import Model
from megazoo.models.hugging_face.config import ConfigReader, head_to_hugging_face
from megazoo.models.hugging_face.names import HFNames
from megazoo.models.registry import register
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.stages import Stage

QK_NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class MPTConfig:
    """The defaults are mpt-7b's, 6.6 billion parameters."""

    vocab_size: int = 50432
    max_positions: int = 2048
    hidden_size: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 0  # 0: as many as heads
    ffn_size: int = 0  # 0: 4 x hidden_size
    alibi: bool = True
    alibi_bias_max: float = 8.0
    learned_positions: bool = True  # only without ALiBi
    clip_qkv: float | None = None
    qk_norm: bool = False
    softmax_scale: float | None = None  # None: head size ** -0.5
    logit_scale: float | None = None
    bias: bool = False  # on every norm and linear layer
    norm_epsilon: float = 1e-5  # but for the norms of queries and keys: see QK_NORM_EPSILON
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0  # of the attention probabilities
    residual_dropout: float = 0.0  # of what attention and MLP add
    tie_embeddings: bool = True
    # above 0: a classifier of sequences; with the next two as transformers has them
    num_labels: int = 0
    problem_type: str | None = None
    pad_token_id: int | None = None

    def __post_init__(self):
        if not self.ffn_size:
            object.__setattr__(self, "ffn_size", 4 * self.hidden_size)
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)

    HUGGING_FACE: ClassVar = {
        "vocab_size": "vocab_size", "max_seq_len": "max_positions", "d_model": "hidden_size", "n_layers": "layers",
        "n_heads": "heads", "learned_pos_emb": "learned_positions", "emb_pdrop": "embedding_dropout",
        "resid_pdrop": "residual_dropout", "tie_word_embeddings": "tie_embeddings",
    }  # fmt: skip

    @classmethod
    def from_hugging_face(cls, fields: ConfigReader) -> "MPTConfig":
        """What llm-foundry means by a config: Hugging Face's port ignores alibi, qk_ln, no_bias and
        more."""
        for name in ("vocab_size", "max_seq_len", "d_model", "n_layers", "n_heads"):
            if name not in fields.values:
                raise UserError(f"the config has no {name}")
        values = fields.renamed(cls.HUGGING_FACE, cls)
        hidden, heads = values["hidden_size"], values["heads"]
        fields.only("norm_type", "low_precision_layernorm", "layernorm")
        fields.only("embedding_fraction", 1.0)
        fields.only("final_logit_softcapping", None)
        fields.only("block_overrides", None)
        fields.only("fuse_norm_attn_norm", False)  # with it the weights have other names
        fields.only("head_dim", hidden // max(heads, 1))
        bias = not fields.take("no_bias", True)
        fields.only("attention_bias", bias)  # llm-foundry writes what it follows from
        epsilon = fields.take("norm_eps", fields.take("layer_norm_epsilon", cls.norm_epsilon))
        logit_scale = fields.take("logit_scale")
        if isinstance(logit_scale, str) and logit_scale != "inv_sqrt_d_model":
            raise UserError(
                f"logit_scale {logit_scale!r} is not supported: it must be a number or 'inv_sqrt_d_model'"
            )
        ffn = fields.nested("ffn_config")
        ffn.only("ffn_type", "mptmlp")
        ffn.only("ffn_act_fn", None, {"name": "gelu"}, {"name": "gelu", "approximate": "none"})
        ffn.finish()
        attention = fields.nested("attn_config")
        for name, supported in {
            "prefix_lm": False,
            "attn_uses_sequence_id": False,
            "rope": False,
            "nope": False,
            "qk_gn": False,
            "attention_bias": bias,
            "sliding_window_size": -1,
            "seq_parallel_world_size": 1,
        }.items():
            attention.only(name, supported)
        tuning = attention.nested("attn_temperature_tuning")
        tuning.only("attn_scale", 0.0)
        tuning.take("floor_scale")  # without effect where the scale is 0
        tuning.finish()
        kind = attention.take("attn_type", "multihead_attention")
        kv_heads = {"multihead_attention": heads, "multiquery_attention": 1}
        kv_heads = kv_heads.get(kind) or (
            attention.take("kv_n_heads") if kind == "grouped_query_attention" else None
        )
        if not kv_heads or attention.take("kv_n_heads", kv_heads) != kv_heads:
            raise UserError(
                f"attn_config.attn_type {kind!r} is not supported with these kv_n_heads"
            )
        values |= {
            "kv_heads": kv_heads,
            "ffn_size": int(hidden * fields.take("expansion_ratio", 4.0)),
            "norm_epsilon": epsilon,
            "bias": bias,
            "logit_scale": hidden**-0.5 if logit_scale == "inv_sqrt_d_model" else logit_scale,
            "alibi": attention.take("alibi", True),
            "alibi_bias_max": float(attention.take("alibi_bias_max", 8.0)),
            "clip_qkv": attention.take("clip_qkv", 0.0) or None,
            "qk_norm": attention.take("qk_ln", False),
            "softmax_scale": attention.take("softmax_scale"),
            "attention_dropout": float(attention.take("attn_pdrop", 0.0)),
        }
        # of a rope that is off
        for name in ("rope_theta", "rope_impl", "rope_dail_config", "rope_hf_config"):
            attention.take(name)
        attention.finish()
        return cls(**values, **fields.head())

    def to_hugging_face(self) -> dict:
        """UserError for what Hugging Face's port does not compute, whatever its config may say."""
        fixed = {
            "alibi": True, "alibi_bias_max": 8.0, "qk_norm": False, "bias": False, "kv_heads": self.heads,
            "ffn_size": 4 * self.hidden_size, "logit_scale": None,
        }  # fmt: skip
        for name, value in fixed.items():
            if getattr(self, name) != value:
                what = f"{name} {getattr(self, name)!r}: transformers' MPT has {value!r} only"
                raise UserError(f"can't be a Hugging Face model with {what}")
        values = {theirs: getattr(self, ours) for theirs, ours in self.HUGGING_FACE.items()}
        scale = None if self.softmax_scale is None else float(self.softmax_scale)
        attention = {
            "alibi": True,
            "clip_qkv": self.clip_qkv and float(self.clip_qkv),
            "softmax_scale": scale,
        }
        values |= {
            "layer_norm_epsilon": float(self.norm_epsilon),
            "expansion_ratio": 4,
            "no_bias": True,
        }
        head = head_to_hugging_face(self, "MptForCausalLM")
        return {**head, "model_type": "mpt", **values, "attn_config": attention}


def _head_norm(config: MPTConfig, heads: int, unit: int) -> HeadwiseLayerNorm:
    features = config.hidden_size // config.heads * heads
    return HeadwiseLayerNorm(features, unit, QK_NORM_EPSILON, bias=config.bias)


class Block(nn.Module):
    """[batch, sequence, hidden] -> the same. The residual projections start smaller, by depth."""

    def __init__(self, config: MPTConfig):
        super().__init__()
        c, residual_std = config, 0.02 / math.sqrt(2 * config.layers)
        self.attention_norm = LayerNorm(c.hidden_size, c.norm_epsilon, bias=c.bias)
        query_unit, kv_unit, _ = units_of_heads(c.heads, c.kv_heads, c.hidden_size // c.heads)
        self.attention = CausalSelfAttention(
            c.hidden_size,
            c.heads,
            c.kv_heads,
            dropout=c.attention_dropout,
            scale=c.softmax_scale,
            clip_qkv=c.clip_qkv,
            q_norm=_head_norm(c, c.heads, query_unit) if c.qk_norm else None,
            k_norm=_head_norm(c, c.kv_heads, kv_unit) if c.qk_norm else None,
            bias=c.bias,
            output_std=residual_std,
        )
        self.attention_dropout = Dropout(c.residual_dropout)
        self.mlp_norm = LayerNorm(c.hidden_size, c.norm_epsilon, bias=c.bias)
        self.mlp = MLP(c.hidden_size, c.ffn_size, F.gelu, bias=c.bias, output_std=residual_std)
        self.mlp_dropout = Dropout(c.residual_dropout)

    def forward(
        self, x: torch.Tensor, batch: MicroBatch, mask: torch.Tensor | None
    ) -> torch.Tensor:
        seed = batch.dropout_seed
        attended = self.attention(self.attention_norm(x), seed, mask=mask, cache=batch.cache)
        x = x + self.attention_dropout(attended, seed)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), seed)


@register("mpt")
class MPT(Model):
    Config = MPTConfig
    presets = {
        "mpt-tiny": MPTConfig(
            vocab_size=257, max_positions=256, hidden_size=128, layers=4, heads=4
        ),
        "mpt-1b": MPTConfig(vocab_size=50368, hidden_size=2048, layers=24, heads=16),
        "mpt-7b": MPTConfig(),
        "mpt-30b": MPTConfig(max_positions=8192, hidden_size=7168, layers=48, heads=64),
    }

    HUGGING_FACE_PREFIX = "transformer."
    HUGGING_FACE_LEGACY = ""
    HUGGING_FACE_NAMES: ClassVar = {  # llm-foundry's, of which Hugging Face's port has a part
        "embedding": HFNames("transformer.wte"),
        "position_embedding": HFNames("transformer.wpe"),
        "layers.{}.attention_norm": HFNames("transformer.blocks.{}.norm_1"),
        "layers.{}.attention.qkv": HFNames("transformer.blocks.{}.attn.Wqkv"),
        "layers.{}.attention.q_norm": HFNames("transformer.blocks.{}.attn.q_ln"),
        "layers.{}.attention.k_norm": HFNames("transformer.blocks.{}.attn.k_ln"),
        "layers.{}.attention.output": HFNames("transformer.blocks.{}.attn.out_proj"),
        "layers.{}.mlp_norm": HFNames("transformer.blocks.{}.norm_2"),
        "layers.{}.mlp.up": HFNames("transformer.blocks.{}.ffn.up_proj"),
        "layers.{}.mlp.down": HFNames("transformer.blocks.{}.ffn.down_proj"),
        "norm": HFNames("transformer.norm_f"),
        "head": HFNames("lm_head"),
        "score": HFNames("score"),
    }

    def __init__(self, config: MPTConfig, ctx: ParallelContext, seed: int = 0):
        super().__init__(config, ctx, seed)
        c, first, last = config, self.stages[0].first, self.stages[-1].last
        tied = c.tie_embeddings and not c.num_labels
        if first or (last and tied):  # the last stage's copy is its head
            self.embedding = VocabParallelEmbedding(c.vocab_size, c.hidden_size)
        if first:
            if c.learned_positions and not c.alibi:
                self.position_embedding = PositionEmbedding(c.max_positions, c.hidden_size)
            self.embedding_dropout = Dropout(c.embedding_dropout)
        self.layers = nn.ModuleDict(
            {str(i): Block(c) for stage in self.stages for i in stage.layers}
        )
        if last:
            self.norm = LayerNorm(c.hidden_size, c.norm_epsilon, bias=c.bias)
            if c.num_labels:
                self.score = ClassificationHead(c.hidden_size, c.num_labels)
            elif not tied:
                self.head = VocabParallelHead(c.vocab_size, c.hidden_size)
        if tied:
            self.tie("embedding.weight", 0, -1)

    def forward_stage(self, x: torch.Tensor, batch: MicroBatch, stage: Stage) -> torch.Tensor:
        if stage.first:  # x: token ids [batch, sequence]
            x = self.embedding(x)
            if hasattr(self, "position_embedding"):
                x = x + self.position_embedding(batch.positions(x.device))
            x = self.embedding_dropout(x, batch.dropout_seed)
        mask = segment_mask(batch.segments, batch.shape[1])
        if self.config.alibi and stage.layers:
            mask = self.alibi(batch, x, mask)
        x = self.run_layers(x, stage, batch, mask)  # x: [batch, sequence, hidden]
        if stage.last:
            x = self.norm(x)
            if self.config.logit_scale is not None and not self.config.num_labels:
                x = x * self.config.logit_scale  # which takes less than on the logits
        return x

    def alibi(self, batch: MicroBatch, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The bias of this rank's heads, one for all layers: [(batch,) heads, sequence, keys]."""
        heads = next(iter(self.layers.values())).attention.heads
        slopes = alibi_slopes(self.config.heads, self.config.alibi_bias_max)
        return alibi_bias(
            slopes[heads.start : heads.stop], batch.shape[1], batch.keys, x.dtype, x.device, mask
        )

    @classmethod
    def stage_costs(cls, config: MPTConfig) -> tuple[float, float, float]:
        c, kv_size = config, config.hidden_size // config.heads * config.kv_heads
        layer = 2 * c.hidden_size * (c.hidden_size + kv_size) + 2 * c.hidden_size * c.ffn_size
        # at a usual training length, not the longest
        scores = min(c.max_positions, 4096) * c.hidden_size
        return layer + scores, 2 * c.hidden_size, (c.num_labels or c.vocab_size) * c.hidden_size
