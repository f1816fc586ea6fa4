"""Attention with linear biases (ALiBi, Press et al. 2022): a penalty that grows with the distance
encodes positions."""

import math

import torch

from megazoo.layers.masks import HIDDEN, in_aligned_rows
from megazoo.parallel.context import ParallelContext, current_context


def alibi_slopes(heads: int, bias_max: float = 8.0) -> torch.Tensor:
    """Return the slope of each head, fp32 [heads].

    If heads is a power of two, these are the powers of 2^(-bias_max / heads), down to 2^-bias_max.
    Otherwise, as in llm-foundry, they are taken from the slopes for the next power of two: first
    every second one, then the others.

    Args:
        heads: number of heads of the model.
        bias_max: negative exponent of the smallest slope.
    """
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 2.0 ** (-torch.arange(1, power + 1, dtype=torch.float32) * bias_max / power)
    return slopes if power == heads else torch.cat([slopes[1::2], slopes[::2]])[:heads]


def alibi_bias(
    slopes: torch.Tensor,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    device: torch.device,
    mask: torch.Tensor | None = None,
    hidden: float = -torch.inf,
    position: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return slope x (key - query), with -inf for keys after the query: [heads, queries, keys].

    It is computed in fp32, because bf16 can't represent all integers above 256.

    Args:
        slopes: fp32 [heads], those of the heads to compute.
        queries: number of queries, which are the last of the tokens.
        keys: number of tokens.
        dtype, device: of the result.
        mask: where a query may attend, bool [batch, 1, queries, keys], if it is restricted further.
            The result then also has a batch dimension.
        hidden: the value instead of -inf.
        position: int64 [1], the position of the only query, if it is not the last key.
    """
    positions = torch.arange(keys, device=device)
    looking = positions[keys - queries :] if position is None else position
    # key - query, at most 0 where the query may attend
    distance = positions[None, :] - looking[:, None]
    rows = () if mask is None else (len(mask),)
    bias = in_aligned_rows((*rows, len(slopes), queries, keys), dtype, device)
    bias.copy_(slopes.to(device)[:, None, None] * distance)
    return bias.masked_fill_(distance > 0 if mask is None else ~mask, hidden)


class ALiBi:
    """Compute the bias for some heads, and cache it for all layers and micro-batches.

    The last bias without a mask is cached; under context parallelism, those of this rank's two
    chunks. Biases are not in the state_dict, and copies of this object start without them.

    Args:
        total: number of heads of the model.
        heads: indices of the heads to compute.
        bias_max: see alibi_slopes.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.
    """

    def __init__(
        self,
        total: int,
        heads: range,
        bias_max: float = 8.0,
        *,
        ctx: ParallelContext | None = None,
    ):
        self.total, self.heads, self.bias_max = total, heads, bias_max
        self._most = 2 if (ctx or current_context()).cp_size > 1 else 1
        self._slopes: torch.Tensor | None = None
        # by queries, keys, dtype, device and heads, oldest first
        self._kept: dict[tuple, torch.Tensor] = {}

    def __call__(
        self,
        queries: int,
        keys: int,
        dtype: torch.dtype,
        device: torch.device,
        mask: torch.Tensor | None = None,
        position: torch.Tensor | None = None,
        heads: range | None = None,
    ) -> torch.Tensor:
        """Return the bias, as alibi_bias.

        Args:
            queries: see alibi_bias.
            keys: see alibi_bias.
            dtype: see alibi_bias.
            device: see alibi_bias.
            mask: see alibi_bias.
            position: see alibi_bias.
            heads: a subset of the heads; default: all of them.
        """
        what, heads = (queries, keys, dtype, device), self.heads if heads is None else heads
        if mask is None and position is None and (*what, heads) in self._kept:
            return self._kept[*what, heads]
        # Training can't use a tensor from the inference mode of generation.
        with torch.inference_mode(False):
            if self._slopes is None or self._slopes.device != device:
                self._slopes = alibi_slopes(self.total, self.bias_max).to(device)
            slopes = self._slopes[heads.start : heads.stop]
            if mask is not None or position is not None:
                return alibi_bias(slopes, *what, mask, HIDDEN, position)
            while len(self._kept) >= self._most:  # free memory before the next one is computed
                del self._kept[next(iter(self._kept))]
            bias = alibi_bias(slopes, *what, None, HIDDEN)
        if device.type != "meta":  # on meta, every micro-batch is measured with the bias
            self._kept[*what, heads] = bias
        return bias

    def __getstate__(self) -> dict:
        return vars(self) | {"_slopes": None, "_kept": {}}
