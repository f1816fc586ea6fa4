"""Distillation: the distribution of a student model approaches that of a teacher."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.distributed as dist

from megazoo.constants import IGNORE_INDEX
from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError, check_number
from megazoo.losses.base import Loss, register_loss
from megazoo.losses.options import DistillationOptions
from megazoo.models.outputs import LanguageModelHead
from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.regions import reduce_from_tensor_parallel


@register_loss("distill")
@dataclass(kw_only=True)
class Distillation(DistillationOptions, Loss):
    """The KL divergence of the student from the teacher (Hinton et al. 2015), of each next token:

        T^2 sum_v p_v (log p_v - log q_v)    p, q: softmax of the logits of teacher and student / T

    The mean is over the labelled tokens of the global batch. Both models have the same vocabulary
    and layout. Their logits are sharded over the vocabulary, and in memory for one micro-batch.
    """

    metrics: ClassVar[tuple[str, ...]] = ("kl", "lm_loss")

    def __post_init__(self):
        check_number("temperature", self.temperature, 0)
        check_number("lm_weight", self.lm_weight, 0, 1)
        if not self.temperature:
            raise UserError("temperature must be above 0")

    @property
    def needs(self) -> dict[str, Literal["row", "token", "part"]]:
        """teacher: the activations of the teacher's last stage."""
        return {"teacher": "part"}

    def sums(self, x: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        assert batch.targets is not None
        teacher, counted = batch.named["teacher"], (batch.targets != IGNORE_INDEX).float()
        kl = self._divergence(x, teacher, counted)
        found, *_ = self.head.log_probabilities(x, batch)
        lm = -found.sum()
        return (1 - self.lm_weight) * kl + self.lm_weight * lm, [kl, lm]

    def _divergence(
        self, x: torch.Tensor, teacher: torch.Tensor, counted: torch.Tensor
    ) -> torch.Tensor:
        """Return the divergence, summed over the labelled tokens: 0-dimensional."""
        assert self.reference_head is not None
        with torch.no_grad():
            logits, normaliser = self._logits(self.reference_head, teacher)
            wanted = logits - normaliser
        logits, normaliser = self._logits(self.head, x)
        # The normaliser of the student is added once, not by each shard.
        of_shard = (wanted.exp() * (wanted - logits)).sum(dim=-1)
        each = reduce_from_tensor_parallel(of_shard, self.ctx) + normaliser[..., 0]
        return self.temperature**2 * (each * counted).sum()

    def _logits(
        self, head: LanguageModelHead, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's shard of the logits at the temperature, less the largest of all
        shards, and the logarithm of the sum of their exponentials over all shards: fp32."""
        logits = head(x).float() / self.temperature
        peak = logits.detach().amax(dim=-1, keepdim=True)
        if self.ctx.tp_size > 1:
            all_reduce(peak, self.ctx.tp_group, dist.ReduceOp.MAX)
        total = reduce_from_tensor_parallel((logits - peak).exp().sum(-1, keepdim=True), self.ctx)
        return logits - peak, total.log()
