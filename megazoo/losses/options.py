"""The settings of losses, as flags of the training program. Nothing here imports torch, which
--help does not need."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megazoo.settings import about

LOSS_OPTIONS: dict[str, type] = {}  # of each loss, by its name in --loss


@dataclass(kw_only=True)
class DPOOptions:
    """Settings of DPO."""

    beta: float = 0.1
    """Strength with which the model is held to the reference."""
    variant: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
    """Form of the loss. sigmoid: that of the paper. ipo: squared, of means over tokens. simpo: of
    means over tokens, without a reference."""
    label_smoothing: Annotated[float, about(below=0.5)] = 0.0
    """Probability that a preference is wrong, with sigmoid and simpo."""
    gamma: float = 0.5
    """Margin of the rewards, with simpo."""


@dataclass(kw_only=True)
class DistillationOptions:
    """Settings of distillation."""

    temperature: float = 1.0
    """Temperature of the softmax of teacher and student. The loss is multiplied by its square."""
    lm_weight: Annotated[float, about(most=1)] = 0.0
    """Weight of the cross-entropy of the labels; the divergence has the rest."""


LOSS_OPTIONS |= {"dpo": DPOOptions, "distill": DistillationOptions}
