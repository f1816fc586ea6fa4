"""Attention with linear biases (Press et al. 2022): positions as a penalty that grows with the
distance."""

import math

import torch

from megazoo.layers.masks import HIDDEN, in_aligned_rows
from megazoo.parallel.context import ParallelContext, current_context


def alibi_slopes(heads: int, bias_max: float = 8.0) -> torch.Tensor:
    """Return the slope of each head, fp32 [heads].

    For a power of two of heads: the powers of 2^(-bias_max / heads), down to 2^-bias_max. For other
    numbers, as llm-foundry has it: of the slopes for the next power of two every second one, then
    the others, as many as there are heads.
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
    """Return slope x (key - query), and -inf for keys that come after the query: [heads, queries,
    keys].

    slopes: fp32, those of the heads wanted. queries: how many of the last tokens look, of `keys` in
    all. mask: where a query may look, bool [batch, 1, queries, keys], if that is less; the bias
    then has a batch dimension, too. hidden: what stands in the place of -inf. position: int64 [1],
    where the only query is, if it is not the last of the keys. Computed in fp32: bf16 can't count
    above 256.
    """
    positions = torch.arange(keys, device=device)
    looking = positions[keys - queries :] if position is None else position
    # key - query, 0 or less where it may look
    distance = positions[None, :] - looking[:, None]
    rows = () if mask is None else (len(mask),)
    bias = in_aligned_rows((*rows, len(slopes), queries, keys), dtype, device)
    bias.copy_(slopes.to(device)[:, None, None] * distance)
    return bias.masked_fill_(distance > 0 if mask is None else ~mask, hidden)


class ALiBi:
    """The bias of some heads, which all layers and micro-batches share: the last one that was made
    without a mask is kept, and under context parallelism those of this rank's two chunks. They are
    no part of a state_dict, and copies of this object start without.

    bias_max: as in alibi_slopes, for `total` heads. heads: those wanted. ctx: parallel context; the
    ambient one by default.
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
        # by queries, keys, dtype, device and heads, the oldest first
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
        """Return the bias of alibi_bias. heads: some of those wanted; all by default."""
        what, heads = (queries, keys, dtype, device), self.heads if heads is None else heads
        if mask is None and position is None and (*what, heads) in self._kept:
            return self._kept[*what, heads]
        # In the inference mode of generation it would be a tensor that training can't use.
        with torch.inference_mode(False):
            if self._slopes is None or self._slopes.device != device:
                self._slopes = alibi_slopes(self.total, self.bias_max).to(device)
            slopes = self._slopes[heads.start : heads.stop]
            if mask is not None or position is not None:
                return alibi_bias(slopes, *what, mask, HIDDEN, position)
            while len(self._kept) >= self._most:  # their memory, before the next one is made
                del self._kept[next(iter(self._kept))]
            bias = alibi_bias(slopes, *what, None, HIDDEN)
        if device.type != "meta":  # there each micro-batch is measured with all that it needs
            self._kept[*what, heads] = bias
        return bias

    def __getstate__(self) -> dict:
        return vars(self) | {"_slopes": None, "_kept": {}}
