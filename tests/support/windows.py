"""Attention with windows, by hand."""

import math

import torch

from megazoo.layers import CausalSelfAttention
from tests.support.layers import drawn_by_name
from tests.support.training import context

TOKENS, HEADS, KV_HEADS, SIZE = 16, 4, 2, 6


TINY = dict(
    vocab_size=61, max_positions=160, hidden_size=32, layers=3, heads=4, kv_heads=2, ffn_size=48
)


def built(window, ctx=None, **options):
    """The attention, with values that depend on the parameters' names alone."""
    with ctx or context():
        layer = CausalSelfAttention(HEADS * SIZE, HEADS, KV_HEADS, window=window, **options)
    return drawn_by_name(layer, lambda spec: 0.3)


def by_hand(layer, x, window, segments=None):
    """The attention of every query by itself, from the formula."""
    q, k, v = layer.qkv(x)
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
    seen = torch.zeros(len(x), 1, x.shape[1], x.shape[1], dtype=torch.bool)
    for query in range(x.shape[1]):
        for key in range(max(0, query - window + 1), query + 1):
            same = True if segments is None else segments[:, query] == segments[:, key]
            seen[:, 0, query, key] = same
    scores = (q @ k.transpose(-1, -2) / math.sqrt(SIZE)).masked_fill(~seen, -torch.inf)
    return layer.output((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
