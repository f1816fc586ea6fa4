"""Rows are classified in every layout: their logits, and how many predictions are right."""

from typing import Any, NamedTuple

import torch

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
    """Counts of rows with labels: rows, right, how many were predicted as they are; and of label 1
    of several, in how many rows it was predicted, in how many it is the label, and in how many
    both."""

    rows: int = 0
    right: int = 0
    predicted: int = 0
    labelled: int = 0
    both: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def accuracy(self) -> float:
        """The share of the rows that are right; of no rows 0."""
        return self.right / max(self.rows, 1)

    @property
    def f1(self) -> float:
        """The harmonic mean of label 1's precision and recall; 0 if it is neither predicted nor
        there."""
        return 2 * self.both / max(self.predicted + self.labelled, 1)


def predictions(logits: torch.Tensor, problem: str) -> torch.Tensor:
    """Return what logits [rows, labels] predict, by the problem_type: int64 [rows], the label with
    the largest; int64 [rows, labels], 1 for those above 0; or, of a regression, the logits."""
    if problem == "single_label_classification":
        return logits.argmax(dim=-1)
    return logits if problem == "regression" else (logits > 0).long()


def tally(logits: torch.Tensor, labels: torch.Tensor, problem: str | None) -> torch.Tensor:
    """Return the numbers of a `Tally`, fp64 [5]: 0 of a regression, whose loss tells all.

    logits: [rows, labels]. labels: as a classifier takes them, none of them -100. A row of several
    labels is right if all of them are. problem: the problem_type, or None.
    """
    problem = problem_of(labels, logits.shape[-1], problem)
    found = predictions(logits, problem)
    counts = torch.zeros(5, dtype=torch.float64, device=logits.device)
    if problem == "regression":
        return counts
    counts[0] = len(labels)
    if problem == "multi_label_classification":
        counts[1] = (found == labels).all(dim=1).sum()
        return counts
    counts[1] = (found == labels).sum()
    counts[2], counts[3] = (found == 1).sum(), (labels == 1).sum()
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
    """Return a classifier's mean loss over the labels of the global batch, how many they are, both
    as `Model.eval_batch` does, and the tally of its predictions, the same on every rank.

    Arguments: as there.
    """
    problem, width, ctx = model.config.problem_type, len(Tally._fields), model.ctx

    def counted(outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the tally of a micro-batch: fp64 [1, 5]."""
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
    """Return a classifier's logits of rows, fp64 [rows, num_labels].

    input_ids: int64 [rows, sequence], padded on the right with the config's pad_token_id. Call it
    with the same rows on every rank of a replica. Replicas with the same rows share them, and each
    gets the logits of all; with rows of its own, each gets theirs. Raises UserError for a language
    model, as `Model.forward` does, and if the logits are no numbers.
    """
    if not model.config.num_labels:
        raise UserError("a language model does not classify: it has no num_labels")
    return of_every_row(
        model,
        Batch(input_ids),
        model.config.num_labels,
        lambda outputs, batch: model.output_head.full_outputs(outputs, batch).double(),
    )
