"""Soft caps of logits and of attention scores: Gemma 2 (Gemma Team 2024)."""

import torch
import torch.nn.functional as F

from megazoo.errors import UserError, check_number


def check_cap(cap: float | None) -> None:
    """Raise UserError unless a soft cap is a number above 0, or None."""
    if cap is not None:
        check_number("soft_cap", cap, 0)
        if not cap:
            raise UserError("soft_cap 0 would leave nothing: use a number above 0, or None")


def soft_capped(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return x, bounded smoothly by -cap and cap: cap tanh(x / cap); x itself without a cap. The
    same shape and dtype."""
    return x if cap is None else cap * torch.tanh(x / cap)


def soft_capped_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scale: float | None,
    cap: float,
) -> torch.Tensor:
    """Return softmax(soft_capped(q k^T * scale) + mask) v: [batch, heads, queries, head_size].

    No fast kernel of torch has a cap: all scores, [batch, heads, queries, keys], exist at once, and
    are kept for backward. The cap has the dtype of q, the softmax is fp32, as in transformers.

    Args:
        q: [batch, heads, queries, head_size]. k, v: of keys, or of fewer heads.
        mask: boolean, True where a query may look, or what is added to the capped scores. None:
            causal where there are as many queries as keys; otherwise a query looks at all keys.
        dropout: probability on the attention weights. scale: head_size ** -0.5 by default.
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
    weights = F.dropout(scores.float().softmax(dim=-1).to(q.dtype), dropout)
    return weights @ v
