"""The last stage of a model: the outputs that it makes of its activations, and their loss.

A model does one of two tasks, which have the same methods: `LanguageModeling` and, if its config
says num_labels, `SequenceClassification`. `LastStage` is what a model inherits: `loss_of` is the
one way from the activations to the loss, and a family may override `outputs`, `token_losses` and
`loss_sum` on it.
"""

from collections.abc import Callable

import torch

from megazoo.engine.batch import check_range, ids_of
from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError
from megazoo.layers import VocabParallelHead, classification, vocab_parallel_cross_entropy
from megazoo.layers.cross_entropy import IGNORE_INDEX
from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.regions import gather_from_context


class LanguageModeling:
    """Every token predicts the next one. Outputs: this rank's logits, [batch, sequence, part of the
    vocabulary]; while generating those of the last position only.

    config: the model's.
    """

    labels_are_of_tokens = True

    def __init__(self, config):
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

    def outputs(self, model, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return model.output_head.logits(x[:, -1:] if batch.last_only else x)

    def whole_outputs(self, model, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        logits = model.output_head.gather_logits(outputs)
        if batch.cut is not None:
            logits = gather_from_context(logits, model.ctx)
        return logits[:, : batch.length]

    def loss_sum(self, model, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return model.token_losses(outputs, batch).sum()

    def label_count(self, targets: torch.Tensor) -> torch.Tensor | int:
        return (targets != IGNORE_INDEX).sum()

    def saves_memory(self, model, batch: MicroBatch, differentiated: bool) -> bool:
        """Return whether the loss takes less memory if the logits are made a few tokens at a time;
        it is then the same, but nothing on the way to it may be a user's own."""
        tokens = batch.shape[0] * batch.shape[1]
        return model._loss_is_ours and model.output_head.loss_saves_memory(tokens, differentiated)


class SequenceClassification:
    """Each row gets a label, or a number for each label. Outputs: [batch, labels], the same on
    every tp rank.

    config: the model's.
    """

    labels_are_of_tokens = False

    def __init__(self, config):
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

    def outputs(self, model, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return model.score(x, batch.scored)

    def whole_outputs(self, model, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return outputs

    def loss_sum(self, model, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        loss = classification.loss_sum(outputs, batch.targets, self.problem_type)
        return _counted_once(loss, model.ctx)

    def label_count(self, targets: torch.Tensor) -> torch.Tensor | int:
        return targets.numel() if targets.is_floating_point() else (targets != IGNORE_INDEX).sum()

    def saves_memory(self, model, batch: MicroBatch, differentiated: bool) -> bool:
        return False


class LastStage:
    """The part of `Model` that turns what the last stage returns into outputs and their loss."""

    @property
    def task(self) -> LanguageModeling | SequenceClassification:
        """What the model is for, by its config."""
        return (SequenceClassification if self.num_labels else LanguageModeling)(self.config)

    @property
    def num_labels(self) -> int:
        """Of a classifier of sequences; 0 for a language model."""
        return self.config.num_labels

    @property
    def output_head(self):
        """The vocabulary-parallel matrix that makes the logits: the head, or the embedding if they
        are tied."""
        return self.head if hasattr(self, "head") else self.embedding

    def outputs(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return what the model says, from what the last stage returns.

        This rank's logits [batch, sequence, part of the vocabulary] (while generating, those of the
        last position), by the head, or by the embedding if they are tied; of a classifier [batch,
        labels].
        """
        return self.task.outputs(self, x, batch)

    def full_logits(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the outputs of whole sequences with the whole vocabulary, the same on every tp and
        cp rank."""
        return self.task.whole_outputs(self, outputs, batch)

    def token_losses(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the loss of every token, in nats, 0 where it has no target: fp32 [batch,
        sequence]."""
        start, shape = self.output_head.start, batch.targets.shape
        losses = vocab_parallel_cross_entropy(
            outputs.flatten(0, 1), batch.targets.flatten(), start, ctx=self.ctx
        )
        return losses.view(shape)

    def loss_sum(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the sum over the micro-batch of what the loss is the mean of."""
        return self.task.loss_sum(self, outputs, batch)

    def label_count(self, batch: MicroBatch) -> torch.Tensor | int:
        """Return how many labels the loss is the mean over: rows, if only the user's own loss knows
        them."""
        if self.ctx.cp_rank > 0 and not self._counts_tokens(batch):
            return 0  # the first rank of those that share the rows counts them
        if batch.targets is not None:
            return self.task.label_count(batch.targets)
        return 0 if batch.labels is None else len(batch.labels)

    def _counts_tokens(self, batch: MicroBatch) -> bool:
        """Return whether the loss is a mean over tokens, of which each context-parallel rank has
        its own; else over rows, which they have together."""
        return batch.targets is not None and self.task.labels_are_of_tokens

    def loss_of(
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
        sum will be, if its backward comes next: only then a long micro-batch is differentiated
        without the logits of all its tokens at once.
        """
        differentiated = torch.is_grad_enabled()
        if (
            outputs is None
            and loss_fn is None
            and (factor is not None or not differentiated)
            and self.task.saves_memory(self, batch, differentiated)
        ):
            return self.output_head.loss_sum(x, batch.targets, factor if differentiated else None)
        outputs = self.outputs(x, batch) if outputs is None else outputs
        return self._loss_by(loss_fn, outputs, batch) if loss_fn else self.loss_sum(outputs, batch)

    def _loss_by(self, loss_fn: Callable, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return what loss_fn says, a mean, times the micro-batch's labels."""
        count = self.label_count(batch)
        if self.ctx.cp_size > 1:  # every rank sees all logits, and is to see all labels
            count = torch.as_tensor(count, device=self.ctx.device).clone()
            all_reduce(count, self.ctx.cp_group)
        if not count:
            return outputs.float().sum() * 0  # its mean would be nan
        loss = loss_fn(self.full_logits(outputs, batch).float(), batch.labels)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UserError("loss_fn must return one number, the mean of the micro-batch")
        if outputs.requires_grad and not loss.requires_grad:
            raise UserError(
                "loss_fn returns a number without a gradient: compute it from the logits, not "
                "detached"
            )
        return _counted_once(loss.float().view(()) * count, self.ctx)

    @property
    def _loss_is_ours(self) -> bool:
        """Whether nothing on the way from the last stage to the loss is a user's own."""
        ours = [(self, LastStage, name) for name in ("outputs", "token_losses", "loss_sum")]
        ours.append((self.output_head, VocabParallelHead, "logits"))
        return all(
            getattr(getattr(owner, name), "__func__", None) is getattr(base, name)
            for owner, base, name in ours
        )


def _counted_once(loss: torch.Tensor, ctx: ParallelContext) -> torch.Tensor:
    """Return a loss that all context-parallel ranks compute alike as a part of their sum: it counts
    on the first of them, and has its gradient on all."""
    return loss if ctx.cp_rank == 0 else loss - loss.detach()
