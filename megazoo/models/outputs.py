"""The heads: what the last stage of a model makes of its activations, and their loss.

A head is a module: `LanguageModelHead`, or `ClassifierHead` if the config says num_labels. What its
labels mean is its `task`, which stages without a head can ask, too.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

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
from megazoo.layers.cross_entropy import IGNORE_INDEX
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
        """Return what each position is to predict: the targets as given, or the labels shifted by
        one. UserError for a token that is not in the vocabulary.

        shape: (batch, sequence). own_loss: labels are for a loss of the user's own: of any shape.
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
        """Return how many targets carry a loss."""
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
        """Return the labels, checked; None if they are for a loss of the user's own."""
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
        """Return the position of each row that it is judged by, int64 [batch]; None without ids,
        which only the first stage has. shape: (batch, sequence)."""
        if self.pad_token_id is None and shape[0] > 1:
            raise UserError(
                "a classifier of several rows needs pad_token_id in its config, to find where each "
                "ends"
            )
        if input_ids is None:
            return None
        return classification.last_tokens(input_ids, self.pad_token_id)

    def label_count(self, targets: torch.Tensor) -> torch.Tensor | int:
        """Return how many labels carry a loss."""
        return targets.numel() if targets.is_floating_point() else (targets != IGNORE_INDEX).sum()


def task_of(config: Any) -> LanguageModeling | SequenceClassification:
    """Return what a model of this config is for."""
    return (SequenceClassification if config.num_labels else LanguageModeling)(config)


class OutputHead:
    """What both heads do: `loss` is the one way from the activations to the loss.

    A custom head of a language model is a subclass of LanguageModelHead, which says what it may
    override.
    """

    ctx: ParallelContext
    task: LanguageModeling | SequenceClassification

    def chunked_loss(
        self, x: torch.Tensor, batch: MicroBatch, factor: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the loss without all outputs at once; None if the head has no such way, or it
        saves no memory. The arguments are those of `loss`."""
        return None

    @property
    def settings(self) -> dict[str, float | None]:
        """What must be equal on the ranks of the last stage, by names for messages."""
        return {}

    def outputs(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return what the model says, from what the last stage returns."""
        raise NotImplementedError

    def full_outputs(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the outputs of whole sequences, the same on every tp and cp rank."""
        raise NotImplementedError

    def loss_sum(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the sum over the micro-batch of what the loss is the mean of, fp32."""
        raise NotImplementedError

    def label_count(self, batch: MicroBatch) -> torch.Tensor | int:
        """Return how many labels the loss is the mean over: rows, if only the user's own loss knows
        them."""
        of_tokens = batch.targets is not None and self.task.labels_are_of_tokens
        if self.ctx.cp_rank > 0 and not of_tokens:
            return 0  # the first rank of those that share the rows counts them
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
        """Return the sum of the losses of a micro-batch, fp32, 0-dimensional, from what the last
        stage returns.

        outputs: those of x, if they are there already. loss_fn: a loss of the user's own, the mean
        of a micro-batch, which is multiplied by its label_count. factor: what the gradient of this
        sum will be, if its backward comes next.
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
        """Return what loss_fn says, a mean, times the micro-batch's labels."""
        count = self.label_count(batch)
        if self.ctx.cp_size > 1:  # every rank sees all logits, and is to see all labels
            count = torch.as_tensor(count, device=self.ctx.device).clone()
            all_reduce(count, self.ctx.cp_group)
        if not count:
            return outputs.float().sum() * 0  # its mean would be nan
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
    """The head of a language model: logits and the cross-entropy of the next tokens.

    Args:
        config: the model's.
        embedding: the token embedding, if the head is tied to it.
        soft_cap: a smooth bound of the logits, if any: see `soft_capped`.
        label_smoothing, z_loss: terms of the loss in training mode, numbers from 0: see LossTerms.
            They may be changed at any time, on all ranks of the last stage alike.

    Outputs: this rank's logits, [batch, sequence, part of the vocabulary]; while generating those
    of the last position only.

    Of a long micro-batch the loss is computed a few tokens at a time, and its logits never exist
    together. A subclass that overrides `outputs`, `logits`, `token_losses` or `loss_sum` gets all
    logits at once. Set `in_pieces = True` only if the overrides leave the loss unchanged. An
    override of `forward`, which makes the logits of `outputs`, counts, too.
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
        """What the loss has besides the cross-entropy: nothing in evaluation mode."""
        if not self.training:
            return PLAIN
        return LossTerms(self.label_smoothing, self.z_loss, self.vocab_size)

    def outputs(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return self(x[:, -1:] if batch.last_only else x)

    def full_outputs(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        logits = self.gather_logits(outputs)
        if batch.cut is not None:
            logits = gather_from_context(logits, self.ctx)
        return logits[:, : batch.length]

    def token_losses(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the loss of every token, in nats, 0 where it has no target: fp32 [batch,
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
        """Return whether nothing that the loss in pieces would leave out is overridden, on the head
        or by a class before LanguageModelHead that does not say in_pieces."""
        if self.OVERRIDES & vars(self).keys():
            return False
        for cls in type(self).__mro__:
            names = vars(cls)
            if "in_pieces" in names or self.OVERRIDES & names.keys():
                return names.get("in_pieces", False)
        return True


CLASSIFIER_HEAD = "score.weight"  # its global name


class ClassifierHead(OutputHead, ClassificationHead):
    """The head of a classifier of sequences: the scores of each row, and their loss.

    config: the model's. Outputs: [batch, labels], the same on every tp rank.
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


def _counted_once(loss: torch.Tensor, ctx: ParallelContext) -> torch.Tensor:
    """Return a loss that all context-parallel ranks compute alike as a part of their sum: it counts
    on the first of them, and has its gradient on all."""
    return loss if ctx.cp_rank == 0 else loss - loss.detach()
