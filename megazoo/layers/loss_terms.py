"""Terms of the loss in addition to the cross-entropy."""

from typing import NamedTuple


class LossTerms(NamedTuple):
    """Terms of the training loss in addition to -log p(target).

    label_smoothing: the fraction of the target distribution that is uniform over the vocabulary,
    from 0 to 1 (Szegedy et al. 2016; as in torch.nn.functional.cross_entropy). z_loss: the weight
    of log(sum(exp(logits)))^2, which keeps the logits near 0 (Chowdhery et al. 2022). vocab_size:
    size of the full vocabulary; required for label smoothing.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    vocab_size: int = 0


PLAIN = LossTerms()
