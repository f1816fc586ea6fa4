"""Losses of preferences: the answer that was chosen and the one that was rejected."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError, check_number
from megazoo.losses.base import Loss, register_loss
from megazoo.losses.options import DPOOptions

VARIANTS = ("sigmoid", "hinge", "ipo", "simpo")


@register_loss("dpo")
@dataclass(kw_only=True)
class DPO(DPOOptions, Loss):
    """Direct preference optimization (Rafailov et al. 2023), with the variants of TRL.

    Rows alternate: an answer that was chosen, and one that was rejected, each after the same
    prompt. The documents of packed rows alternate, too. Labels are -100 except in the answers. The
    mean is over the pairs of the global batch. A pair without labels does not count.

    variant: sigmoid, the loss of the paper; hinge (Zhao et al. 2023); ipo (Azar et al. 2023), of
    log-probabilities that are means over tokens; simpo (Meng et al. 2024), also of means, without a
    reference.
    """

    rows_together: ClassVar[int] = 2
    metrics: ClassVar[tuple[str, ...]] = (
        "margin", "accuracy", "chosen_reward", "rejected_reward", "chosen_logprob",
        "rejected_logprob",
    )  # fmt: skip

    def __post_init__(self):
        if self.variant not in VARIANTS:
            known = ", ".join(VARIANTS)
            raise UserError(f"DPO has no variant {self.variant!r}: use one of {known}")
        check_number("beta", self.beta, 0)
        check_number("gamma", self.gamma, 0)
        check_number("label_smoothing", self.label_smoothing, 0, 0.5)
        if not self.beta:
            raise UserError("DPO needs a beta above 0")
        if self.label_smoothing and self.variant in ("hinge", "ipo"):
            raise UserError(f"DPO's variant {self.variant} has no label_smoothing: use 0")

    @property
    def needs(self) -> dict[str, Literal["row", "token", "part"]]:
        """reference: sum of the log-probabilities of each row's labels under the reference; of each
        document of packed rows."""
        return {} if self.variant == "simpo" else {"reference": "row"}

    def count(self, batch: MicroBatch) -> torch.Tensor | int:
        pairs = self._counts(batch).sum()
        return pairs if self.ctx.cp_rank == 0 else 0

    def sums(self, x: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logprobs, counts = self.log_probabilities_of_rows(x, batch), self._counts(batch)
        of_tokens = logprobs
        if self.variant in ("ipo", "simpo"):
            of_tokens = logprobs / self.labels_of_rows(batch).clamp(min=1)
        before = batch.named.get("reference", torch.zeros_like(logprobs)).to(logprobs).flatten()
        if self.variant == "ipo":
            before = before / self.labels_of_rows(batch).clamp(min=1)
        chosen, rejected = (of_tokens - before).view(-1, 2).unbind(dim=1)
        losses = self._losses(chosen - rejected)
        rewards = self.beta * torch.stack([chosen, rejected, chosen - rejected])
        shown = [rewards[2], (rewards[2] > 0).float(), rewards[0], rewards[1]]
        shown += logprobs.view(-1, 2).unbind(dim=1)
        total, *metrics = (self.counted_once((each * counts).sum()) for each in (losses, *shown))
        return total, metrics

    def _counts(self, batch: MicroBatch) -> torch.Tensor:
        """Return 1 for each pair with labels, otherwise 0: [pairs]."""
        return (self.labels_of_rows(batch).view(-1, 2).sum(dim=1) > 0).float()

    def _losses(self, difference: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair.

        difference: of the chosen and the rejected answer, in log-probability over the reference.
        """
        if self.variant == "hinge":
            return F.relu(1 - self.beta * difference)
        if self.variant == "ipo":
            return (difference - 1 / (2 * self.beta)).square()
        logits = self.beta * difference
        if self.variant == "simpo":
            logits = logits - self.gamma
        smoothing = self.label_smoothing
        return -F.logsigmoid(logits) * (1 - smoothing) - F.logsigmoid(-logits) * smoothing
