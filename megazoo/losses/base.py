"""The base class of losses, and their registry."""

import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch

from megazoo.constants import IGNORE_INDEX
from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError
from megazoo.losses.options import LOSS_OPTIONS
from megazoo.models.outputs import LanguageModelHead, OutputHead
from megazoo.parallel.collectives import all_reduce
from megazoo.parallel.regions import reduce_from_context

LOSSES: dict[str, type["Loss"]] = {}
Class = TypeVar("Class", bound=type["Loss"])


class _WithHead(OutputHead):
    """A head that computes with the weights of another one, and adds up metrics."""

    head: LanguageModelHead
    totals: torch.Tensor | None


@dataclass(kw_only=True)
class Loss(_WithHead):
    """A loss of a language model, in place of the cross-entropy: `train_batch(loss=...)`.

    A subclass is a dataclass: its fields are settings. It defines `sums` and, unless the mean is
    over labelled tokens, `count`. On the last stage they are called for each micro-batch.

    Attributes:
        rows_together: Number of neighbouring rows that belong together, such as 2 for a pair. A
            micro-batch holds all of them. If rows have several documents, each document counts as
            a row, and a row holds all that belong together.
        metrics: Names of the values that `sums` returns in addition to the loss. The means over the
            global batch are in `model.engine.loss_metrics`.
        head: The head of the model.
        reference_head: The head of a reference model, if the loss computes with it.
    """

    rows_together: ClassVar[int] = 1
    reference_head: ClassVar[LanguageModelHead | None] = None
    metrics: ClassVar[tuple[str, ...]] = ()

    def bound(self, head: LanguageModelHead) -> Self:
        """Return this loss with the head of a model."""
        made = type(self)(**self.settings)
        made.head, made.ctx, made.task, made.totals = head, head.ctx, head.task, None
        vars(made)["reference_head"] = self.reference_head
        return made

    @property
    def needs(self) -> dict[str, Literal["row", "token", "part"]]:
        """Tensors of a batch that the loss reads from `batch.named`, by name, and what they are
        per: row, [batch, ...], or [batch, documents, ...] of packed rows; token, [batch, sequence,
        ...]; part, [batch, ...] of this rank's part of the sequence, as a run of a model in the
        same layout returned it."""
        return {}

    @property
    def settings(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def compared(self) -> dict[str, Any]:
        """Values that must be equal on all ranks that train with the loss."""
        return {"loss": type(self).__name__, **self.settings}

    def sums(self, x: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the loss and the metrics of a micro-batch, summed over what `count` counts.

        Under context parallelism, this rank's part of the sums; `batch` has its part of the tokens.

        Args:
            x: activations of the last stage, [batch, sequence, hidden].
            batch: the micro-batch.
        """
        raise NotImplementedError

    def count(self, batch: MicroBatch) -> torch.Tensor | int:
        """Return the number that the mean is over: of a micro-batch, this rank's part."""
        return self.head.label_count(batch)

    def label_count(self, batch: MicroBatch) -> torch.Tensor | int:
        return self.count(batch)

    def loss(self, x: torch.Tensor, batch: MicroBatch, *_: Any, **__: Any) -> torch.Tensor:
        loss, metrics = self.sums(x, batch)
        if metrics:
            found = torch.stack([each.detach().double() for each in metrics])
            self.totals = found if self.totals is None else self.totals + found
        return loss

    def log_probabilities_of_rows(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the sum of the log-probabilities of the labels of each row: fp32 [batch], the same
        on every tp and cp rank. Packed rows: of each document, [batch * documents]."""
        found, *_ = self.head.log_probabilities(x, batch)
        return reduce_from_context(_sums_of_documents(found, batch), self.ctx)

    def labels_of_rows(self, batch: MicroBatch) -> torch.Tensor:
        """Return the number of labels of each row: int64 [batch], the same on every cp rank. Packed
        rows: of each document, [batch * documents]; 0 for a document that the row lacks."""
        assert batch.targets is not None
        count = _sums_of_documents((batch.targets != IGNORE_INDEX).long(), batch)
        if self.ctx.cp_size > 1:
            all_reduce(count, self.ctx.cp_group)
        return count

    def counted_once(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value that is the same on all cp ranks as this rank's part of a sum: its value
        counts only on the first rank, its gradient on all."""
        return value if self.ctx.cp_rank == 0 else value - value.detach()


def _sums_of_documents(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the sums of values of tokens over each document: [batch * documents]."""
    numbers = batch.document_numbers()
    if numbers is None:
        return values.sum(dim=1)
    sums = values.new_zeros(len(values), batch.documents)
    return sums.scatter_add(1, numbers, values).flatten()


def register_loss(name: str) -> Callable[[Class], Class]:
    """Return a class decorator that registers a loss.

    Args:
        name: Its name in --loss: lower-case letters, digits and underscores.

    Raises:
        UserError: The name is taken or not valid, or a field has no default.
    """
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or name == "lm":
        raise UserError(
            f"a loss can't have the name {name!r}: use lower-case letters, digits and underscores, "
            "and not lm"
        )

    def register(loss: Class) -> Class:
        for f in fields(loss):
            if f.default is MISSING:
                raise UserError(f"the field {f.name} of the loss {name} needs a default")
        LOSSES[name] = LOSS_OPTIONS[name] = loss
        return loss

    return register
