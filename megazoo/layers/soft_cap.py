"""Soft caps of logits and of attention scores: Gemma 2 (Gemma Team 2024)."""

import torch

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
