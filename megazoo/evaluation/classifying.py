"""Evaluation of classifiers in any parallel layout: logits of rows, and counts of correct
predictions."""

from typing import Any, NamedTuple

import torch

from megazoo.constants import IGNORE_INDEX
from megazoo.engine.batch import Batch
from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.pipeline import run_pipeline
from megazoo.errors import UserError
from megazoo.evaluation.scoring import of_every_row
from megazoo.layers.classification import problem_of
from megazoo.layers.dropout import without_dropout
from megazoo.parallel.collectives import all_reduce, broadcast_from_stage
from megazoo.parallel.failure import on_all_ranks


class Tally(NamedTuple):
    """Counts of labelled rows.

    Attributes:
        rows: Number of rows.
        right: Rows with a correct prediction.
        predicted: Rows for which label 1 is predicted (single-label classification).
        labelled: Rows whose label is 1.
        both: Rows for which label 1 is predicted and correct.
    """

    rows: int = 0
    right: int = 0
    predicted: int = 0
    labelled: int = 0
    both: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def accuracy(self) -> float:
        """The fraction of rows with a correct prediction; 0 without rows."""
        return self.right / max(self.rows, 1)

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall of label 1; 0 if label 1 occurs neither in
        labels nor in predictions."""
        return 2 * self.both / max(self.predicted + self.labelled, 1)


def predictions(logits: torch.Tensor, problem: str) -> torch.Tensor:
    """Convert logits to predictions.

    Args:
        logits: [rows, labels].
        problem: The problem_type of the model's config.

    Returns:
        For a single label, int64 [rows]: the label with the largest logit. For several labels,
            int64 [rows, labels]: 1 where the logit is above 0. For a regression, the logits.
    """
    if problem == "single_label_classification":
        return logits.argmax(dim=-1)
    return logits if problem == "regression" else (logits > 0).long()


def tally(logits: torch.Tensor, labels: torch.Tensor, problem: str | None) -> torch.Tensor:
    """Count correct predictions.

    Args:
        logits: [rows, labels].
        labels: Labels as a classifier takes them. Rows with -100 or NaN do not count.
        problem: The problem_type, or None to derive it from the labels.

    Returns:
        The fields of a `Tally`, fp64 [5]. All are 0 for a regression, which is measured by its
            loss. A row of several labels counts as right if all its labels are right.
    """
    problem = problem_of(labels, logits.shape[-1], problem)
    found = predictions(logits, problem)
    counts = torch.zeros(5, dtype=torch.float64, device=logits.device)
    if problem == "regression":
        return counts
    if problem == "multi_label_classification":
        counts[0] = (~labels.isnan().any(dim=1)).sum()
        counts[1] = (found == labels).all(dim=1).sum()
        return counts
    is_row = labels != IGNORE_INDEX
    counts[0], counts[1] = is_row.sum(), (found == labels).sum()
    counts[2], counts[3] = ((found == 1) & is_row).sum(), (labels == 1).sum()
    counts[4] = ((found == 1) & (labels == 1)).sum()
    return counts


@torch.no_grad()
@on_all_ranks
def evaluate_rows(
    model: Any,
    input_ids: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    *,
    num_microbatches: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, Tally]:
    """Evaluate a classifier on a batch.

    Args:
        model: The classifier.
        input_ids: int64 [batch, sequence]; needed on the first stage.
        labels: Labels as `Model.eval_batch` takes them; needed on the last stage.
        num_microbatches: Number of micro-batches; it must divide the batch.

    Returns:
        The mean loss over the labels of the global batch, the number of labels, and the tally of
            predictions. All are the same on every rank.
    """
    problem, width, ctx = model.config.problem_type, len(Tally._fields), model.ctx

    def counted(outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the tally of a micro-batch, fp64 [1, 5]."""
        assert batch.targets is not None
        return tally(model.output_head.full_outputs(outputs, batch), batch.targets, problem)[None]

    with without_dropout(model):
        batches = model.engine.micro_batches(Batch(input_ids, labels), num_microbatches)
        result = run_pipeline(model, batches, collect=counted)
    counts = torch.zeros(width, dtype=torch.float64, device=ctx.device)
    if result.collected is not None:
        counts += result.collected.sum(dim=0)
        all_reduce(counts, ctx.dp_group)
    broadcast_from_stage(counts, ctx.placement.last_rank, ctx)
    return result.loss, result.labelled, Tally(*map(int, counts.tolist()))


@torch.no_grad()
@on_all_ranks
def classify(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Return a classifier's logits.

    Call it with the same rows on every rank of a replica. If all replicas pass the same rows, the
    rows are divided among the replicas, and every rank gets all logits. Replicas that pass
    different rows get the logits of their rows.

    Args:
        model: The classifier.
        input_ids: int64 [rows, sequence], padded on the right with the config's pad_token_id.

    Returns:
        The logits, fp64 [rows, num_labels].

    Raises:
        UserError: The model is a language model, the logits are not finite, or an argument is
            invalid (as in `Model.forward`).
    """
    if not model.config.num_labels:
        raise UserError("a language model does not classify: it has no num_labels")
    return of_every_row(
        model,
        Batch(input_ids),
        model.config.num_labels,
        lambda outputs, batch: model.output_head.full_outputs(outputs, batch).double(),
    )
