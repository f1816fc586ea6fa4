"""The heads of models, which compute the outputs and the loss from the last stage's activations.

A head is a module: `LanguageModelHead`, or `ClassifierHead` if the config has num_labels. Its
`task` defines the meaning of the labels; stages without a head also use the task.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from megazoo.constants import IGNORE_INDEX
from megazoo.engine.batch import check_range, ids_of
from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError, check_number
from megazoo.layers import (
    ClassificationHead,
    VocabParallelEmbedding,
    VocabParallelHead,
    classification,
    vocab_parallel_cross_entropy,
)
from megazoo.layers.loss_terms import PLAIN, LossTerms
from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.regions import gather_from_context


class LanguageModeling:
    """Every token predicts the next one. config: the model's."""

    labels_are_of_tokens = True

    def __init__(self, config: Any):
        self.vocab_size = config.vocab_size

    def targets(
        self,
        targets: torch.Tensor | None,
        labels: torch.Tensor | None,
        shape: tuple[int, int],
        own_loss: bool,
    ) -> torch.Tensor | None:
        """Return the target of each position: the given targets, or the labels shifted by one.

        shape: (batch, sequence). own_loss: the labels are for a custom loss, and may have any
        shape. UserError for a token that is not in the vocabulary.
        """
        if labels is not None and not own_loss:
            labels = ids_of("labels", labels)
        if labels is not None and tuple(labels.shape) == shape and not labels.is_floating_point():
            targets = torch.full_like(labels, IGNORE_INDEX)
            targets[:, :-1] = labels[:, 1:]
        vocabulary = f"the vocabulary of {self.vocab_size}"
        check_range("label", targets, self.vocab_size, vocabulary, besides=IGNORE_INDEX)
        return targets

    def scored_positions(
        self, input_ids: torch.Tensor | None, shape: tuple[int, int]
    ) -> torch.Tensor | None:
        """Return None: all positions are scored."""
        return None

    def label_count(self, targets: torch.Tensor) -> torch.Tensor | int:
        """Return the number of targets that count in the loss."""
        return (targets != IGNORE_INDEX).sum()


class SequenceClassification:
    """Each row gets a label, or a number for each label. config: the model's."""

    labels_are_of_tokens = False

    def __init__(self, config: Any):
        self.vocab_size, self.num_labels = config.vocab_size, config.num_labels
        self.problem_type, self.pad_token_id = config.problem_type, config.pad_token_id

    def targets(
        self,
        targets: torch.Tensor | None,
        labels: torch.Tensor | None,
        shape: tuple[int, int],
        own_loss: bool,
    ) -> torch.Tensor | None:
        """Return the labels after a check; None if they are for a custom loss."""
        if targets is not None:
            raise UserError("a classifier takes labels, not targets")
        if labels is None or own_loss:
            return None
        labels = labels if labels.is_floating_point() else labels.long()
        classification.check_labels(labels, shape[0], self.num_labels, self.problem_type)
        return labels

    def scored_positions(
        self, input_ids: torch.Tensor | None, shape: tuple[int, int]
    ) -> torch.Tensor | None:
        """Return the position of each row whose activations are classified, int64 [batch]; None if
        input_ids is None, as on all stages except the first. shape: (batch, sequence)."""
        if self.pad_token_id is None and shape[0] > 1:
            raise UserError(
                "a classifier needs pad_token_id in its config for batches of several rows, to "
                "find the last token of each row"
            )
        if input_ids is None:
            return None
        return classification.last_tokens(input_ids, self.pad_token_id)

    def label_count(self, targets: torch.Tensor) -> torch.Tensor | int:
        """Return the number of labels that count in the loss."""
        no_loss = targets.isnan() if targets.is_floating_point() else targets == IGNORE_INDEX
        return (~no_loss).sum()


def task_of(config: Any) -> LanguageModeling | SequenceClassification:
    """Return the task of a model with this config."""
    return (SequenceClassification if config.num_labels else LanguageModeling)(config)


class OutputHead:
    """The base of both heads. `loss` computes the loss from the activations.

    A custom head of a language model is a subclass of LanguageModelHead; its docstring lists what a
    subclass may override.
    """

    ctx: ParallelContext
    task: LanguageModeling | SequenceClassification

    def chunked_loss(
        self, x: torch.Tensor, batch: MicroBatch, factor: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the loss, computed in chunks without storing all outputs; None if the head does
        not support it, or it saves no memory. The arguments are those of `loss`."""
        return None

    @property
    def settings(self) -> dict[str, float | None]:
        """Settings that must be equal on the ranks of the last stage, by their names in errors."""
        return {}

    def has_loss(self, batch: MicroBatch) -> bool:
        """Return whether there is a loss of this micro-batch, because it has labels."""
        return batch.targets is not None or batch.labels is not None

    def outputs(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the outputs of the model (logits or scores). x: activations of the last stage."""
        raise NotImplementedError

    def full_outputs(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the outputs gathered over tp and cp, the same on each of their ranks."""
        raise NotImplementedError

    def loss_sum(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the loss summed over the labels of the micro-batch, fp32, 0-dimensional."""
        raise NotImplementedError

    def label_count(self, batch: MicroBatch) -> torch.Tensor | int:
        """Return the number of labels that the loss is the mean over; with a custom loss on labels
        that are not of tokens, the number of rows."""
        of_tokens = batch.targets is not None and self.task.labels_are_of_tokens
        if self.ctx.cp_rank > 0 and not of_tokens:
            return 0  # only the first of the ranks that share the rows counts them
        if batch.targets is not None:
            return self.task.label_count(batch.targets)
        return 0 if batch.labels is None else len(batch.labels)

    def loss(
        self,
        x: torch.Tensor,
        batch: MicroBatch,
        factor: torch.Tensor | None = None,
        *,
        outputs: torch.Tensor | None = None,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the sum of the losses of a micro-batch, fp32, 0-dimensional.

        Args:
            x: activations of the last stage, [batch, sequence, hidden].
            batch: the micro-batch.
            factor: the gradient of this sum, if its backward follows immediately.
            outputs: the outputs of x, if they are already computed.
            loss_fn: a custom loss. It returns the mean of a micro-batch, which is multiplied by
                label_count.
        """
        if outputs is None and loss_fn is None:
            loss = self.chunked_loss(x, batch, factor)
            if loss is not None:
                return loss
        outputs = self.outputs(x, batch) if outputs is None else outputs
        if loss_fn:
            return self._loss_by(loss_fn, outputs, batch)
        return self.loss_sum(outputs, batch)

    def _loss_by(self, loss_fn: Callable, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the mean that loss_fn returns, times the number of labels."""
        count = self.label_count(batch)
        if self.ctx.cp_size > 1:  # every rank has all logits, so it must count all labels
            count = torch.as_tensor(count, device=self.ctx.device).clone()
            all_reduce(count, self.ctx.cp_group)
        if not count:
            return outputs.float().sum() * 0  # the mean would be nan
        loss = loss_fn(self.full_outputs(outputs, batch).float(), batch.labels)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UserError("loss_fn must return one number, the mean of the micro-batch")
        if outputs.requires_grad and not loss.requires_grad:
            raise UserError(
                "loss_fn returns a number without a gradient: compute it from the logits, not "
                "detached"
            )
        return _counted_once(loss.float().view(()) * count, self.ctx)


class LanguageModelHead(OutputHead, VocabParallelHead):
    """Compute the logits of a language model, and the cross-entropy of the next tokens.

    The outputs are this rank's shard of the logits, [batch, sequence, vocabulary shard]; while
    generating, only those of the last position.

    For a long micro-batch the loss is computed in chunks of tokens, so that the logits are never
    all in memory. This is disabled for a subclass that overrides `outputs`, `forward`, `logits`,
    `token_losses` or `loss_sum`, unless it sets `in_pieces = True`. Set it only if the overrides do
    not change the loss.

    Args:
        config: the model's config.
        embedding: the token embedding, if the head is tied to it.
        soft_cap: smooth bound of the logits: see `soft_capped`; by default none.
        label_smoothing, z_loss: terms of the loss in training mode, numbers from 0: see LossTerms.
            They may be changed at any time, equally on all ranks of the last stage.
    """

    in_pieces = True
    OVERRIDES: ClassVar = {"outputs", "forward", "logits", "token_losses", "loss_sum"}

    def __init__(
        self,
        config: Any,
        *,
        embedding: VocabParallelEmbedding | None = None,
        soft_cap: float | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(
            config.vocab_size, config.hidden_size, embedding=embedding, soft_cap=soft_cap, ctx=ctx
        )
        check_number("label_smoothing", label_smoothing, 0, 1)
        check_number("z_loss", z_loss, 0)
        self.task = LanguageModeling(config)
        self.label_smoothing, self.z_loss = label_smoothing, z_loss

    @property
    def settings(self) -> dict[str, float | None]:
        names = ("soft_cap", "label_smoothing", "z_loss")
        return {f"the head's {name}": getattr(self, name) for name in names}

    @property
    def terms(self) -> LossTerms:
        """Terms of the loss in addition to the cross-entropy; none in evaluation mode."""
        if not self.training:
            return PLAIN
        return LossTerms(self.label_smoothing, self.z_loss, self.vocab_size)

    def outputs(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self(x[:, -1:] if batch.last_only else x)

    def full_outputs(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return _whole_sequence(self.gather_logits(outputs), batch, self.ctx)

    def log_probabilities(
        self, x: torch.Tensor, batch: MicroBatch, top_k: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log-probabilities of the next token at each position, the same on every tp rank.

        The logits are computed in chunks of tokens, and again in backward, except for a subclass
        that changes them.

        Returns:
            That of the target, fp32 [batch, sequence], 0 without a target; and without a gradient
            the top_k largest ones, fp32 [batch, sequence, top_k], with their token ids, int64.
        """
        assert batch.targets is not None
        if self._may_take_pieces():
            return self.log_probabilities_in_pieces(x, batch.targets, top_k)
        every = self.gather_logits(self.outputs(x, batch)).float().log_softmax(dim=-1)
        ignored = batch.targets == IGNORE_INDEX
        found = every.gather(-1, batch.targets.masked_fill(ignored, 0)[..., None])[..., 0]
        values, ids = every.detach().topk(top_k)
        return found.masked_fill(ignored, 0), values, ids

    def of_log_probabilities(self, top_k: int = 0) -> "TokenLogProbabilities":
        """Return a head with the weights of this one, for a run that needs log-probabilities."""
        return TokenLogProbabilities(self, top_k)

    def token_losses(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the loss of every token in nats, 0 for tokens without a target: fp32 [batch,
        sequence]."""
        assert batch.targets is not None
        losses = vocab_parallel_cross_entropy(
            outputs.flatten(0, 1),
            batch.targets.flatten(),
            self.start,
            terms=self.terms,
            ctx=self.ctx,
        )
        return losses.view(batch.targets.shape)

    def loss_sum(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self.token_losses(outputs, batch).sum()

    def chunked_loss(
        self, x: torch.Tensor, batch: MicroBatch, factor: torch.Tensor | None
    ) -> torch.Tensor | None:
        differentiated = torch.is_grad_enabled()
        if (differentiated and factor is None) or not self._may_take_pieces():
            return None
        if not self.pieces_save_memory(batch.shape[0] * batch.shape[1], differentiated):
            return None
        assert batch.targets is not None
        factor = factor if differentiated else None
        return self.loss_in_pieces(x, batch.targets, factor, self.terms)

    def _may_take_pieces(self) -> bool:
        """Return whether the loss may be computed in chunks: no method that chunks would skip is
        overridden, except in a class with in_pieces = True."""
        if self.OVERRIDES & vars(self).keys():
            return False
        for cls in type(self).__mro__:
            names = vars(cls)
            if "in_pieces" in names or self.OVERRIDES & names.keys():
                return names.get("in_pieces", False)
        return True


class TokenLogProbabilities(OutputHead):
    """Compute log-probabilities in place of the logits of a language model, and no loss.

    The outputs are fp32 [batch, sequence, 1 + 2 top_k]: for the next token at each position, the
    log-probability of the target, the top_k largest log-probabilities, and their token ids (exact
    below 2^24).

    head: the head of the model. top_k: number of the largest log-probabilities.
    """

    def __init__(self, head: LanguageModelHead, top_k: int = 0):
        self.head, self.top_k, self.task = head, top_k, head.task

    @property
    def ctx(self) -> ParallelContext:
        return self.head.ctx

    def has_loss(self, batch: MicroBatch) -> bool:
        return False

    def outputs(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        found, values, ids = self.head.log_probabilities(x, batch, self.top_k)
        return torch.cat([found[..., None], values, ids.float()], dim=-1)

    def full_outputs(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return _whole_sequence(outputs, batch, self.ctx)


CLASSIFIER_HEAD = "score.weight"  # its global name


class ClassifierHead(OutputHead, ClassificationHead):
    """Compute the scores of a sequence classifier, [batch, labels], and their loss.

    The scores are the same on every tp rank. config: the model's config.
    """

    def __init__(self, config: Any, *, ctx: ParallelContext | None = None):
        super().__init__(config.hidden_size, config.num_labels, ctx=ctx)
        self.task: SequenceClassification = SequenceClassification(config)

    def outputs(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self(x, batch.scored)

    def full_outputs(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return outputs

    def loss_sum(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        assert batch.targets is not None
        loss = classification.loss_sum(outputs, batch.targets, self.task.problem_type)
        return _counted_once(loss, self.ctx)


def _whole_sequence(x: torch.Tensor, batch: MicroBatch, ctx: ParallelContext) -> torch.Tensor:
    """Gather [batch, this rank's part, size] over cp, and remove the padding of the layout."""
    if batch.cut is not None:
        x = gather_from_context(x, ctx)
    return x[:, : batch.length]


def _counted_once(loss: torch.Tensor, ctx: ParallelContext) -> torch.Tensor:
    """Return a loss that is the same on all cp ranks as this rank's summand: its value counts only
    on the first rank, its gradient on all."""
    return loss if ctx.cp_rank == 0 else loss - loss.detach()
