"""Multi-head latent attention, as a user adds it from outside of the package (DeepSeek-V3)."""

from functools import partial

import torch
from einops import rearrange

from megazoo.layers import (
    Attend,
    ColumnParallelLinear,
    Layer,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
    rotate,
)
from megazoo.parallel.regions import enter_tensor_parallel


class LatentAttention(Layer):
    """Attend with queries, keys and values that are projected from compressed ones.

    The compressions are replicated over tp, and the heads are sharded. A query and a key have
    features without positions, and rotary ones. All heads have the same rotary features of a key.
    The parameters have the names of transformers.

    Args:
        hidden_size: size of the last dimension of x.
        heads: heads over all tp ranks.
        query_rank: features of the compressed queries.
        kv_rank: features of the compressed keys and values.
        plain_size: features of a query and a key without positions.
        rotary_size: rotary features of a query and a key.
        value_size: features of a value.
        scale: factor of the scores; default: (plain_size + rotary_size) ** -0.5.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        query_rank: int,
        kv_rank: int,
        plain_size: int,
        rotary_size: int,
        value_size: int,
        scale: float | None = None,
        ctx=None,
    ):
        super().__init__(ctx)
        self.size, self.rotary_size = plain_size + rotary_size, rotary_size
        self.key_and_value = plain_size, value_size
        self.q_a_proj = ReplicatedLinear(hidden_size, query_rank, ctx=ctx)
        self.q_a_layernorm = RMSNorm(query_rank, ctx=ctx)
        self.q_b_proj = self._of_heads(query_rank, heads, self.size)
        self.kv_a_proj_with_mqa = ReplicatedLinear(hidden_size, kv_rank + rotary_size, ctx=ctx)
        self.kv_a_layernorm = RMSNorm(kv_rank, ctx=ctx)
        self.kv_b_proj = self._of_heads(kv_rank, heads, plain_size + value_size)
        self.attend = Attend(heads, self.size, value_size=value_size, scale=scale, ctx=ctx)
        self.o_proj = RowParallelLinear(
            heads * value_size, hidden_size, bias=False, unit=value_size, ctx=ctx
        )
        self.recompute = False

    def _of_heads(self, inputs: int, heads: int, size: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(inputs, heads * size, bias=False, units=(size,), ctx=self.ctx)

    def forward(self, x, seed=None, rotary=None, mask=None, cache=None):
        """Return the attention output, [batch, sequence, hidden]: as CausalSelfAttention."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        compressed, k_rotary = self._split(self.kv_a_proj_with_mqa(x))
        kv = self.kv_b_proj(self.kv_a_layernorm(compressed))
        # every rank uses it for its heads
        k_rotary = enter_tensor_parallel(k_rotary, self.ctx)
        q, kv = (
            rearrange(y, "batch seq (heads size) -> batch heads seq size", size=size)
            for y, size in ((q, self.size), (kv, sum(self.key_and_value)))
        )
        k, v = kv.split(self.key_and_value, dim=-1)
        q_plain, q_rotary = self._split(q)
        q = torch.cat([q_plain, rotate_pairs(q_rotary, *rotary)], dim=-1)
        k_rotary = rotate_pairs(k_rotary[:, None], *rotary).expand(-1, k.shape[1], -1, -1)
        k = torch.cat([k, k_rotary], dim=-1)
        attend = partial(self.attend, seed=seed, mask=mask, cache=cache, keep=self.recompute)
        if self.recompute:
            return self.o_proj((q, k, v), recompute=attend)
        return self.o_proj(attend(q, k, v))

    def _split(self, x):
        """Split off the last features, which are rotary."""
        return x.tensor_split([x.shape[-1] - self.rotary_size], dim=-1)


def rotate_pairs(x, cos, sin):
    """Rotate neighbouring features, and put the first of all pairs before the second ones."""
    return rotate(torch.cat([x[..., ::2], x[..., 1::2]], dim=-1), cos, sin)
