"""Distillation: the distribution of a student model approaches that of a teacher."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.distributed as dist

from megazoo.constants import IGNORE_INDEX
from megazoo.engine.batch import check_range
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
        kl = (self._divergences(x, batch) * (batch.targets != IGNORE_INDEX)).sum()
        found, *_ = self.head.log_probabilities(x, batch)
        lm = -found.sum()
        return (1 - self.lm_weight) * kl + self.lm_weight * lm, [kl, lm]

    def _divergences(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the divergence of each token: fp32 [batch, sequence]."""
        assert self.reference_head is not None
        with torch.no_grad():
            logits, normaliser = self._logits(self.reference_head, batch.named["teacher"])
            wanted = logits - normaliser
        logits, normaliser = self._logits(self.head, x)
        # The normaliser of the student is added once, not by each shard.
        of_shard = (wanted.exp() * (wanted - logits)).sum(dim=-1)
        each = reduce_from_tensor_parallel(of_shard, self.ctx) + normaliser[..., 0]
        return self.temperature**2 * each

    def _logits(
        self, head: LanguageModelHead, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's shard of the logits at the temperature, less the largest of all
        shards, and the logarithm of the sum of their exponentials over all shards: fp32."""
        logits = head(x).float() / self.temperature
        peak, total = self._exponentials(logits)
        return logits - peak, total.log()

    def _exponentials(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest logit of all shards, and the sum over all shards of the exponentials
        of the logits less the largest one."""
        peak = logits.detach().amax(dim=-1, keepdim=True)
        if self.ctx.tp_size > 1:
            all_reduce(peak, self.ctx.tp_group, dist.ReduceOp.MAX)
        of_shard = (logits - peak).exp().sum(-1, keepdim=True)
        return peak, reduce_from_tensor_parallel(of_shard, self.ctx)


@dataclass(kw_only=True)
class TopKDistillation(Distillation):
    """The KL divergence from the K most likely tokens of a teacher, of each next token:

        sum_k p_k (log p_k - log q_k) + p_r (log p_r - log q_r)    p_r, q_r: 1 - their sums

    All other tokens count as one, the rest. The mean is over the labelled tokens of the global
    batch. If K is the size of the vocabulary, this is the divergence of `Distillation`.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.temperature != 1:
            raise UserError(
                f"temperature {self.temperature:g} must be 1 with the most likely tokens of a "
                "teacher, because another one needs the log-probabilities of all tokens: use 1"
            )

    @property
    def needs(self) -> dict[str, Literal["row", "token", "part"]]:
        """teacher_ids: the most likely next tokens at each position, without duplicates, int64
        [batch, sequence, K]. teacher_logprobs: their log-probabilities, in the same order."""
        return {"teacher_ids": "token", "teacher_logprobs": "token"}

    def _divergences(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        ids, wanted = batch.named["teacher_ids"], batch.named["teacher_logprobs"].double()
        if ids.shape != wanted.shape:
            raise UserError(
                f"teacher_ids has the shape {list(ids.shape)}, and teacher_logprobs has "
                f"{list(wanted.shape)}: they must be equal"
            )
        vocabulary = self.task.vocab_size
        check_range("teacher_ids", ids, vocabulary, f"the vocabulary of {vocabulary}")
        logits, normaliser = self._logits(self.head, x)
        columns, size = ids - self.head.start, logits.shape[-1]
        here = (columns >= 0) & (columns < size)
        chances = wanted.exp()
        has_rest = ids.shape[-1] < vocabulary  # otherwise the difference is a rounding error
        rest = (1 - chances.sum(-1)).clamp(min=0) * has_rest
        of_teacher = (torch.xlogy(chances, chances).sum(-1) + torch.xlogy(rest, rest)).float()
        chances, rest = chances.float(), rest.float()
        own = logits.gather(-1, columns.clamp(0, size - 1))
        found = reduce_from_tensor_parallel((chances * here * own).sum(-1), self.ctx)
        if has_rest:
            found = found + rest * self._log_of_others(logits, columns.masked_fill(~here, size))
        # The normaliser of the student is added once, not by each shard.
        return of_teacher - found + (chances.sum(-1) + rest) * normaliser[..., 0]

    def _log_of_others(self, logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the sum of the exponentials of all shards' logits, except those
        in these columns of this shard: fp32 [batch, sequence]."""
        shape = (*logits.shape[:-1], logits.shape[-1] + 1)  # the last column: of another shard
        top = torch.zeros(shape, dtype=torch.bool, device=logits.device)
        others = logits.masked_fill(top.scatter_(-1, columns, True)[..., :-1], -torch.inf)
        peak, total = self._exponentials(others)
        return (peak + total.log())[..., 0]
