"""A user's model, written from the documentation only: the block of OLMo 2, which normalises the
outputs of attention and MLP, not their inputs. Queries and keys are normalised head by head."""

from dataclasses import dataclass

import megazoo
from megazoo.layers import RMSNorm
from megazoo.models import llama


@dataclass(frozen=True)
class MyOlmoConfig(llama.LlamaConfig):
    """The fields of LLaMA."""


class Block(llama.Block):
    def attention_settings(self, config, index):
        size = config.hidden_size // config.heads
        norms = [RMSNorm(size, config.norm_epsilon, parallel=True) for _ in "qk"]
        return super().attention_settings(config, index) | {"q_norm": norms[0], "k_norm": norms[1]}

    def forward(self, x, batch, rotary, mask):
        attended = self.attention(x, batch.dropout_seed, rotary, mask, batch.cache)
        x = x + self.attention_norm(attended)
        return x + self.mlp_norm(self.mlp(x))


@megazoo.register("my-olmo")
class MyOlmo(llama.Llama):
    Config, Block = MyOlmoConfig, Block
    HUGGING_FACE_NAMES = {}  # this model has no Hugging Face format
    presets = {
        "my-olmo-tiny": MyOlmoConfig(
            vocab_size=257,
            max_positions=256,
            hidden_size=64,
            layers=4,
            heads=4,
            kv_heads=2,
            ffn_size=192,
            rope_theta=500000.0,
        )
    }
