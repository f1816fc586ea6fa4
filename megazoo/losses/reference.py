"""Log-probabilities of rows and activations of a reference model, which losses need."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from megazoo import lora
from megazoo.engine.batch import Batch
from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.pipeline import run_pipeline
from megazoo.layers.dropout import without_dropout
from megazoo.losses.base import Loss
from megazoo.parallel.failure import on_all_ranks


class _OfRows(Loss):
    """Computes the log-probability of each row's labels, fp32 [batch], and no loss."""

    def has_loss(self, batch: MicroBatch) -> bool:
        return False

    def outputs(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        found = self.log_probabilities_of_rows(x, batch)
        return found.view(batch.shape[0], -1) if batch.documents > 1 else found

    def full_outputs(self, outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return outputs


class _Activations(_OfRows):
    """Returns the activations of the last stage, and computes no loss."""

    def outputs(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return x


@on_all_ranks
@torch.no_grad()
def reference_logprobs(
    model: Any, num_microbatches: int = 1, **batch: Any
) -> dict[str, torch.Tensor]:
    """Return what losses of preferences need of a reference, without dropout.

    Every rank calls it, with the batch of its replica.

    Args:
        model: the reference: a model in the layout of the trained one, or that model within
            `megazoo.lora.off(model)`.
        num_microbatches: number of micro-batches; it must divide the batch.
        batch: tensors of `train_batch`, with labels or targets.

    Returns:
        On the last stage, "reference": the sum of the log-probabilities of each row's labels, fp32
        [batch]; of packed rows, those of each document, [batch, documents]. On other stages,
        nothing.
    """
    return _collected("reference", _OfRows(), model, num_microbatches, batch)


@on_all_ranks
@torch.no_grad()
def teacher_activations(
    model: Any, num_microbatches: int = 1, **batch: Any
) -> dict[str, torch.Tensor]:
    """Return what distillation needs of a teacher, without dropout.

    Args:
        model: the teacher, in the layout of the student.
        num_microbatches: as in the call that trains the student.
        batch: tensors of `train_batch`, with labels or targets.

    Returns:
        On the last stage, "teacher": the activations of its last layer. On other stages, nothing.
    """
    return _collected("teacher", _Activations(), model, num_microbatches, batch)


def _collected(name: str, loss: Loss, model: Any, count: int, batch: dict) -> dict:
    """Run forwards of a model, and return what the loss computes on the last stage."""
    with without_dropout(model):
        micro_batches = model.engine.micro_batches(Batch(**batch), count, loss=loss)
        model.engine.require_labels(micro_batches)
        head = loss.bound(model.output_head) if model.has_last else None
        collect = head.full_outputs if head else None
        found = run_pipeline(model, micro_batches, head=head, collect=collect).collected
    return {} if found is None else {name: found}


# Functions that compute what a loss needs of a reference, by the name of the tensor.
COMPUTED = {"reference": reference_logprobs, "teacher": teacher_activations}


class Reference:
    """A loss, and what it needs of a reference for each batch.

    Attributes:
        loss: The loss; None for the cross-entropy.
        model: The reference; None if the loss needs none.
    """

    def __init__(self, loss: Loss | None, model: Any, other: Callable[[], Any] | None = None):
        """Create the reference of a model.

        Args:
            loss: the loss; None for the cross-entropy.
            model: the trained model. Without its adapters it is the reference, unless there is
                `other`.
            other: returns a model in the same layout. It is called if the loss needs a reference.
        """
        needs = loss.needs if loss else {}
        self.loss, self.model = loss, None
        self._compute = next((COMPUTED[name] for name in COMPUTED if name in needs), None)
        self._off: Any = nullcontext if other else lora.off
        if self._compute and loss:
            self.model = other() if other else model
            if other:
                self.model.eval().requires_grad_(False)
            if "teacher" in needs and self.model.has_last:
                vars(loss)["reference_head"] = self.model.output_head

    def drop(self) -> None:
        """Drop the model: what the loss needs is in the batches."""
        self.model = self._compute = None

    def __call__(self, batch: dict[str, Any], microbatches: int) -> dict[str, torch.Tensor]:
        """Return the named tensors of a batch; {} if the loss needs none."""
        if not self._compute:
            return {}
        with self._off(self.model):
            return self._compute(self.model, num_microbatches=microbatches, **batch)
