"""Qwen3's shape (Yang et al. 2025): a LLaMA whose queries and keys are normalised head by head."""

import math
from dataclasses import dataclass

import megazoo
from megazoo.layers import CausalSelfAttention, RMSNorm
from megazoo.models import HFNames, llama


@dataclass(frozen=True)
class QwenConfig(llama.LlamaConfig):
    head_size: int = 128
    rope_theta: float = 1e6


class Block(llama.Block):
    def __init__(self, c, index):
        super().__init__(c, index)
        self.attention = CausalSelfAttention(
            c.hidden_size, c.heads, c.kv_heads, c.head_size,
            q_norm=RMSNorm(c.head_size, c.norm_epsilon, parallel=True),
            k_norm=RMSNorm(c.head_size, c.norm_epsilon, parallel=True),
            bias=False, output_std=0.02 / math.sqrt(2 * c.layers),
        )  # fmt: skip


@megazoo.register("qwen")
class Qwen(llama.Llama):
    Config, Block = QwenConfig, Block
    presets = {
        "qwen-tiny": QwenConfig(
            vocab_size=61, max_positions=16, hidden_size=32, layers=5, heads=4, kv_heads=2,
            ffn_size=48, head_size=12
        )
    }  # fmt: skip
    HUGGING_FACE_NAMES = llama.Llama.HUGGING_FACE_NAMES | {
        f"layers.{{}}.attention.{name}": HFNames(f"model.layers.{{}}.self_attn.{name}")
        for name in ("q_norm", "k_norm")
    }
