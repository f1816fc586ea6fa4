"""Sequence classification as in transformers: the position that is scored, and the loss."""

import torch
import torch.nn.functional as F

from megazoo.constants import IGNORE_INDEX
from megazoo.errors import UserError
from megazoo.layers.layer import Layer
from megazoo.layers.matmul import linear
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.regions import reduce_from_context, reduce_from_tensor_parallel
from megazoo.parallel.sequence import SequenceCut
from megazoo.parallel.shard import ParameterSpec

PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


def last_tokens(input_ids: torch.Tensor, pad_token_id: int | None) -> torch.Tensor:
    """Return the position of the last token of each row that is not padding, or 0 if all are
    padding: int64 [batch]."""
    batch, sequence = input_ids.shape
    if pad_token_id is None:  # for one row only
        return torch.full((batch,), sequence - 1, device=input_ids.device)
    place = torch.arange(sequence, device=input_ids.device)
    return (place * (input_ids != pad_token_id)).amax(dim=1)


def check_labels(labels: torch.Tensor, batch: int, num_labels: int, problem: str | None) -> None:
    """Raise UserError for labels that are not valid for the problem type."""
    kind = problem_of(labels, num_labels, problem)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "single_label_classification": [(batch,)],
        "multi_label_classification": [(batch, num_labels)],
        "regression": [(batch, num_labels)],
    }
    if num_labels == 1:
        shapes["regression"].append((batch,))
    if tuple(labels.shape) not in shapes[kind]:
        wanted = " or ".join(str(list(shape)) for shape in shapes[kind])
        raise UserError(f"labels have the shape {list(labels.shape)}; {kind} needs {wanted}")
    if kind == "single_label_classification":
        wrong = (labels != IGNORE_INDEX) & ((labels < 0) | (labels >= num_labels))
        if not labels.is_cuda and bool(wrong.any()):
            raise UserError(
                f"label {int(labels[wrong][0])} is outside the range 0 to {num_labels - 1}"
            )


def problem_of(labels: torch.Tensor, num_labels: int, problem: str | None) -> str:
    """Return the problem type: that of the config, otherwise inferred from the labels."""
    if problem is not None:
        return problem
    if num_labels == 1:
        return "regression"
    return (
        "multi_label_classification"
        if labels.is_floating_point()
        else "single_label_classification"
    )


def loss_sum(logits: torch.Tensor, labels: torch.Tensor, problem: str | None) -> torch.Tensor:
    """Return the sum of the losses, in fp32: squared differences, or cross-entropies.

    Integer labels of -100 and float labels of NaN have no loss.
    """
    logits, kind = logits.float(), problem_of(labels, logits.shape[-1], problem)
    if kind == "single_label_classification":
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    labels = labels.view_as(logits).float()
    if kind == "regression":
        return F.mse_loss(logits, torch.where(labels.isnan(), logits, labels), reduction="sum")
    return F.binary_cross_entropy_with_logits(
        logits, labels.nan_to_num(), weight=(~labels.isnan()).float(), reduction="sum"
    )


class ClassificationHead(Layer):
    """Score the labels from one position of each sequence; no bias; replicated on every tp rank.

    Args:
        hidden_size: size of the last dimension of x.
        num_labels: number of labels.
        std: standard deviation of the initial weights.
        ctx: parallel context; default: that of the enclosing `with ctx:` block.

    Shapes:
        x [batch, sequence, hidden], positions int64 [batch] -> [batch, num_labels]. Under context
        and sequence parallelism x is this rank's part of the sequence; the positions are those in
        the full sequence.
    """

    def __init__(
        self,
        hidden_size: int,
        num_labels: int,
        *,
        std: float = 0.02,
        ctx: ParallelContext | None = None,
    ):
        super().__init__(ctx)
        self.add_parameter("weight", ParameterSpec((num_labels, hidden_size), std=std))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows, ctx = torch.arange(len(x), device=x.device), self.ctx
        if ctx.cp_size == 1 and not ctx.sequence_parallel:
            return linear(x[rows, positions], self.use("weight"))
        parts = ctx.tp_size if ctx.sequence_parallel else 1
        cut = SequenceCut.of(x.shape[1] * parts * ctx.cp_size, ctx)
        local = positions if cut is None else cut.local(positions)
        if ctx.sequence_parallel:
            local = local - ctx.tp_rank * x.shape[1]
        # one rank has the position, the others add zeros
        here = (local >= 0) & (local < x.shape[1])
        pooled = x[rows, local.masked_fill(~here, 0)].masked_fill(~here[:, None], 0)
        scores = linear(pooled, self.use("weight"))
        if ctx.sequence_parallel:
            scores = reduce_from_tensor_parallel(scores, ctx)
        return reduce_from_context(scores, ctx)
