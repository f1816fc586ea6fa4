"""What a loss may have besides the plain cross-entropy, and the soft cap of logits and scores."""

from typing import NamedTuple

import torch


class LossTerms(NamedTuple):
    """What a training loss has besides -log p(target).

    label_smoothing: the share of the target distribution that is uniform over the vocabulary, from
    0 to 1 (Szegedy et al. 2016; as in torch.nn.functional.cross_entropy). z_loss: the weight of
    log(sum(exp(logits)))^2, which keeps the logits near 0 (Chowdhery et al. 2022). vocab_size: of
    the whole vocabulary; label smoothing needs it.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    vocab_size: int = 0


PLAIN = LossTerms()


def soft_capped(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return x, bounded smoothly by -cap and cap: cap tanh(x / cap); x itself without a cap. The
    same shape and dtype. Source: Gemma 2, Gemma Team 2024."""
    return x if cap is None else cap * torch.tanh(x / cap)
