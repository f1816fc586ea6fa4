"""The plain formula of attention, for what the fast kernels of torch lack: soft caps and sinks."""

import torch
import torch.nn.functional as F

from megazoo.layers.soft_cap import soft_capped


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scale: float | None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(soft_capped(q k^T * scale) + mask) v: [batch, heads, queries, head_size].

    The softmax of a head with a sink has one more score, the sink, which has no value:

        weight = exp(score) / (exp(sink) + sum over the keys of exp(score))

    All scores, [batch, heads, queries, keys], are in memory together and are saved for backward.
    The cap has the dtype of q. The softmax is fp32, as in transformers.

    Args:
        q: [batch, heads, queries, head_size].
        k, v: [batch, heads or fewer key-value heads, keys, head_size].
        mask: boolean, True where a query may attend, or a tensor that is added to the capped
            scores. None: causal if there are as many queries as keys; otherwise a query attends to
            all keys.
        dropout: dropout probability of the attention weights.
        scale: factor of the scores; default: head_size ** -0.5.
        cap: bound of the scores, or None.
        sinks: [heads], the sink of each head, or None. The cap does not bound it.

    Source: soft caps: Gemma Team 2024. Sinks: OpenAI 2025 (gpt-oss).
    """
    groups, queries, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = soft_capped(q @ k.transpose(-1, -2) * scale, cap)
    if mask is None and queries == keys > 1:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    scores = scores.float()
    if sinks is not None:
        of_queries = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, of_queries], dim=-1)
    weights = scores.softmax(dim=-1)[..., :keys].to(q.dtype)
    return F.dropout(weights, dropout) @ v
