"""Attention for tests: models that attend, documents, and each of them alone."""

from itertools import pairwise

import torch

import megazoo
from tests.support.training import randomize


def attentive(config, ctx):
    """A model whose attention matters: at first, with small weights, it hardly does."""
    model = randomize(megazoo.from_config(config, ctx, seed=3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 5 if parameter.dim() > 1 else 1
    return model


LENGTHS = [(15,), (1, 14), (4, 5, 6), (7, 1, 1, 1, 5), (8, 7), (15,), (2, 13), (14, 1)]


calls = []


def each_alone(
    q, k, v, boundaries, longest, scale, key_boundaries=None, longest_of_keys=None, *, window=None
):
    """Stands in for varlen_attention: each document's softmax by hand. Its queries are the last of
    its tokens, as flash-attention says of a causal mask: it ends in the lower right corner."""
    if key_boundaries is None:
        key_boundaries, longest_of_keys = boundaries, longest
    ends = boundaries.tolist(), key_boundaries.tolist()
    calls.append(len(ends[0]) - 1)
    for each, tokens, their in zip((boundaries, key_boundaries), (q, k), ends, strict=True):
        assert each.dtype == torch.int32
        assert (their[0], their[-1]) == (0, len(tokens))
    scale, parts = q.shape[-1] ** -0.5 if scale is None else scale, []
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    for (start, end), (first, last) in zip(*map(pairwise, ends), strict=True):
        queries, keys = end - start, last - first
        assert 0 <= queries <= keys
        assert queries <= longest
        assert keys <= longest_of_keys
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k[first:last]) * scale
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        seen = seen if window is None else seen.triu(keys - queries + 1 - window)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v[first:last]))
    return torch.cat(parts)


def documents():
    """Eight rows of 15 tokens; the last document of some is padding."""
    ids = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS]
    )
    ids[2, 9:] = -1
    return ids
