"""Soft caps of logits and of attention scores: Gemma 2 (Gemma Team 2024)."""

import torch
import torch.nn.functional as F

from megazoo.errors import UserError, check_number


def check_cap(cap: float | None) -> None:
    """Raise UserError unless a soft cap is a number above 0, or None."""
    if cap is not None:
        check_number("soft_cap", cap, 0)
        if not cap:
            raise UserError("soft_cap must be a number above 0, or None; got 0")


def soft_capped(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return cap tanh(x / cap), between -cap and cap; without a cap, x. Same shape and dtype."""
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

    The fast kernels of torch have no cap, so all scores, [batch, heads, queries, keys], are in
    memory together and are saved for backward. The cap has the dtype of q. The softmax is fp32, as
    in transformers.

    Args:
        q: [batch, heads, queries, head_size].
        k, v: [batch, heads or fewer key-value heads, keys, head_size].
        mask: boolean, True where a query may attend, or a tensor that is added to the capped
            scores. None: causal if there are as many queries as keys; otherwise a query attends to
            all keys.
        dropout: dropout probability of the attention weights.
        scale: factor of the scores; default: head_size ** -0.5.
        cap: bound of the scores.
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
