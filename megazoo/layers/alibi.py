"""Attention with linear biases (Press et al. 2022): positions as a penalty that grows with the
distance."""

import math

import torch


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
    position: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return slope x (key - query), and -inf for keys that come after the query: [heads, queries,
    keys].

    slopes: fp32, those of the heads wanted. queries: how many of the last tokens look, of `keys` in
    all. mask: where a query may look, bool [batch, 1, queries, keys], if that is less; the bias
    then has a batch dimension, too. position: int64 [1], where the only query is, if it is not the
    last of the keys. Computed in fp32: bf16 can't count above 256.
    """
    positions = torch.arange(keys, device=device)
    looking = positions[keys - queries :] if position is None else position
    # key - query, 0 or less where it may look
    distance = positions[None, :] - looking[:, None]
    bias = slopes.to(device)[:, None, None] * distance
    return bias.masked_fill(distance > 0 if mask is None else ~mask, -torch.inf).to(dtype)
