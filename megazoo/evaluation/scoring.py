"""Losses of texts and log-likelihoods of choices, in any parallel layout."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from megazoo.constants import IGNORE_INDEX
from megazoo.engine.batch import Batch
from megazoo.engine.calls import using_context
from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.pipeline import run_pipeline
from megazoo.errors import UserError, check_number
from megazoo.generate.decoding import not_finite
from megazoo.layers.dropout import without_dropout
from megazoo.parallel.agreement import sharing_axis
from megazoo.parallel.axes import Axis
from megazoo.parallel.collectives import all_reduce, broadcast_from_stage
from megazoo.parallel.failure import on_all_ranks
from megazoo.parallel.shares import share_of
from megazoo.parallel.storage import storage_of
from megazoo.tokenizer.base import first_token


class Scores(NamedTuple):
    """Scores of rows, each [batch].

    Attributes:
        log_likelihood: float64: sum of the log-probabilities of a row's targets, in nats.
        tokens: int64: number of targets.
        greedy: bool: whether greedy decoding would choose every target.
    """

    log_likelihood: torch.Tensor
    tokens: torch.Tensor
    greedy: torch.Tensor


@torch.no_grad()
@on_all_ranks
def score(model: Any, input_ids: torch.Tensor, targets: torch.Tensor) -> Scores:
    """Score the targets of each row with a language model.

    Call it with the same rows on every rank of a replica. If all replicas pass the same rows, the
    rows are divided among the replicas, and every rank gets all scores. Replicas that pass
    different rows get the scores of their rows.

    Args:
        model: The language model.
        input_ids: int64 [batch, sequence], padded on the right.
        targets: int64 [batch, sequence]: targets[b, s] is the token to predict at position s, or
            -100 for none.

    Raises:
        UserError: The model is a classifier, the logits are not finite, or an argument is invalid
            (as in `Model.forward`).
    """
    if model.config.num_labels:
        raise UserError("a classifier does not score tokens")

    def of_rows(outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the log-likelihood, token count and greedy flag of each row, fp64 [batch, 3]."""
        head, targets = model.output_head, batch.targets
        assert targets is not None
        labelled = targets != IGNORE_INDEX
        losses = head.token_losses(outputs, batch)
        best = head.full_outputs(outputs, batch).argmax(dim=-1)
        # positions that sequence parallelism adds have no logits
        best = F.pad(best, (0, labelled.shape[1] - best.shape[1]))
        greedy = (~labelled | (targets == best)).all(dim=1)
        return torch.stack(
            [-losses.double().sum(1), labelled.double().sum(1), greedy.double()], dim=1
        )

    scores = of_every_row(model, Batch(input_ids, targets=targets), 3, of_rows)
    return Scores(scores[:, 0], scores[:, 1].long(), scores[:, 2].bool())


@torch.no_grad()
@on_all_ranks
def score_tokens(
    model: Any, input_ids: torch.Tensor, targets: torch.Tensor, top_k: int = 0
) -> torch.Tensor:
    """Score each target of each row with a language model. Rows are divided among the ranks as by
    `score`, and errors are the same.

    Args:
        model: The language model.
        input_ids: int64 [batch, sequence], padded on the right.
        targets: int64 [batch, sequence], as those of `score`.
        top_k: Number of most likely tokens to return for each position.

    Returns:
        fp64 [batch, sequence, 1 + 2 top_k]: the log-probability of the target (0 for none), the
            top_k largest log-probabilities in descending order, and their token ids.
    """
    if model.config.num_labels:
        raise UserError("a classifier does not score tokens")
    check_number("top_k", top_k, 0, model.config.vocab_size + 1, whole=True)
    head = model.output_head.of_log_probabilities(top_k) if model.has_last else None
    shape = (*input_ids.shape, 1 + 2 * top_k)

    def of_rows(outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        assert head
        return head.full_outputs(outputs, batch).flatten(1).double()

    batch = Batch(input_ids, targets=targets)
    return of_every_row(model, batch, shape[1] * shape[2], of_rows, head).view(shape)


def of_every_row(
    model: Any,
    batch: Batch,
    columns: int,
    of_rows: Callable[[torch.Tensor, MicroBatch], torch.Tensor],
    head: Any = None,
) -> torch.Tensor:
    """Compute numbers for each row.

    Args:
        model: The model.
        batch: The rows, the same on every rank of a replica. Replicas with the same rows divide
            them. Context-parallel ranks act as replicas.
        columns: Number of values per row.
        of_rows: of_rows(outputs, batch) returns the numbers of a micro-batch's rows on the last
            stage, fp64 [rows, columns].
        head: Computes the outputs; by default the model's head.

    Returns:
        fp64 [rows, columns], the same on every rank that has the rows.

    Raises:
        UserError: A number is not finite.
    """
    model.ctx.require_ranks()
    sharing = sharing_axis(model.ctx, batch.input_ids, batch.targets)
    with using_context(model, model.ctx.cp_as_dp):
        return _of_every_row(model, batch, columns, of_rows, head, sharing)


def _of_every_row(
    model: Any, batch: Batch, columns: int, of_rows: Callable, head: Any, sharing: Axis
) -> torch.Tensor:
    assert batch.input_ids is not None
    ctx, rows = model.ctx, len(batch.input_ids)
    if sharing.size > 1:  # an invalid batch raises on every rank
        with without_dropout(model):
            model.engine.micro_batches(batch, 1)
    mine = share_of(range(rows), sharing.size, sharing.rank)
    values = torch.zeros(rows, columns, dtype=torch.float64, device=ctx.device)
    # with folded axes and ZeRO-3, layers of all replicas communicate: those without rows run the
    # first one
    together = bool(ctx.folded or storage_of(model))
    part = slice(mine.start, mine.stop) if mine or not together else slice(0, 1)
    if part.start < part.stop:
        # the largest number of micro-batches up to pp_size that divides the rows
        most = 1 if together else min(len(mine), ctx.pp_size)
        count = max(n for n in range(1, most + 1) if len(mine) % n == 0)
        with without_dropout(model):
            targets = None if batch.targets is None else batch.targets[part]
            taken = replace(batch, input_ids=batch.input_ids[part], targets=targets)
            batches = model.engine.micro_batches(taken, count)
            how = {"head": head, "collect": of_rows}
            result = run_pipeline(model, batches, global_batch=False, **how).collected
        if result is not None and mine:
            values[part] = result
    broadcast_from_stage(values, ctx.placement.last_rank, ctx)
    all_reduce(values, sharing.group)  # other ranks' rows are 0
    if not bool(values.isfinite().all()):
        raise not_finite(model.dtype)
    return values


@dataclass
class TextLoss:
    """The total loss of texts.

    Attributes:
        documents: Number of documents.
        tokens: Number of predicted tokens.
        bytes: Number of bytes.
        nats: Sum of the token losses.
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0

    @property
    def loss(self) -> float:
        """The mean loss per token, in nats."""
        return self.nats / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        """exp(loss), with the loss capped at 700 to avoid overflow."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """The total loss in bits divided by the number of bytes. It can be compared between
        tokenizers."""
        return self.nats / math.log(2) / max(self.bytes, 1)


def evaluate_texts(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str | bytes],
    *,
    length: int,
    stride: int = 0,
    batch: int = 8,
    progress: Callable[[int], object] | None = None,
    top_k: int = 0,
    each: Callable[[list[int], torch.Tensor], object] | None = None,
) -> TextLoss:
    """Return the loss of texts. Each token is predicted once.

    The first token is predicted from the token that begins texts: bos, otherwise the end of
    document.

    Args:
        model: The language model.
        tokenizer: Its tokenizer.
        texts: The texts.
        length: Window length in tokens. Longer texts are split into windows.
        stride: Distance between windows; 0: no overlap. Tokens shared with the previous window are
            only context.
        batch: Windows per batch.
        progress: Called with the number of bytes of each text after it is read.
        top_k: Number of most likely tokens for `each`.
        each: Called at the end for each text, in order, with its token ids and their scores, fp64
            [tokens, 1 + 2 top_k]: see `score_tokens`.
    """
    if not 0 <= stride <= length:
        raise UserError(f"stride {stride} must be from 1 to the window's {length}, or 0")
    total, waiting, start = TextLoss(), [], first_token(tokenizer)
    scored: list[tuple[list[int], list[torch.Tensor]]] = []  # per text, if `each` needs them

    def flush() -> None:
        inputs, targets = padded([window for window, _ in waiting])
        scores, predicted = score_tokens(model, inputs, targets, top_k), targets != IGNORE_INDEX
        total.nats -= float(scores[..., 0].sum())
        total.tokens += int(predicted.sum())
        for (_, parts), row, places in zip(waiting, scores.cpu(), predicted, strict=True):
            parts.append(row[places])
        waiting.clear()

    for text in texts:
        ids = [start, *tokenizer.encode(text, add_special_tokens=False, parse_special=False)]
        parts = [torch.empty(0, 1 + 2 * top_k, dtype=torch.float64)]
        if each:
            scored.append((ids[1:], parts))
        for window in windows(ids, length, stride or length):
            waiting.append((window, parts))
            if len(waiting) == batch:
                flush()
        size = len(text if isinstance(text, bytes) else text.encode())
        total.documents, total.bytes = total.documents + 1, total.bytes + size
        if progress:
            progress(size)
    if waiting:
        flush()
    if each:
        for ids, parts in scored:
            each(ids, torch.cat(parts))
    return total


def windows(ids: list[int], length: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Split ids into windows of at most length + 1 ids.

    Every id except the first is predicted once, with at least length - stride previous ids if there
    are that many. The last id of a window is predicted, but is not an input.

    Yields:
        The ids of a window, and the number of leading ids that are only context.
    """
    predicted = 1  # number of leading ids that need no prediction
    while predicted < len(ids):
        end = min(max(predicted - 1 + stride, length) + 1, len(ids))
        first = max(0, end - length - 1)
        yield ids[first:end], predicted - first
        predicted = end


def score_choices(
    model: Any,
    tokenizer: Any,
    requests: list[tuple[str, str]],
    *,
    batch: int = 8,
    progress: Callable[[int], object] | None = None,
) -> list[tuple[float, int, bool]]:
    """Score continuations of contexts, for example for evaluation harnesses.

    Context and continuation are encoded together, as in running text. Spaces at the end of the
    context, and tokens across the boundary, are part of the continuation. An empty context is
    replaced by the token that begins texts. A context that is too long for the model is truncated
    on the left.

    Args:
        model: The language model.
        tokenizer: Its tokenizer.
        requests: Pairs (context, continuation).
        batch: Choices per batch.
        progress: Called with the number of choices of each batch.

    Returns:
        For each request the continuation's log-likelihood, its number of tokens, and whether greedy
            decoding produces it.
    """
    longest = model.longest_sequence(model.config)
    rows = [_choice_row(tokenizer, *request, longest) for request in requests]
    results: list = []
    for first in range(0, len(rows), batch):
        scores = score(model, *padded(rows[first : first + batch]))
        results += zip(*(column.tolist() for column in scores), strict=True)
        if progress:
            progress(len(scores[0]))
    return results


def _choice_row(
    tokenizer: Any, context: str, continuation: str, longest: int
) -> tuple[list[int], int]:
    """Return at most `longest` + 1 ids of a context and its continuation, and the number of context
    ids."""
    text = context.rstrip()  # in most vocabularies a token includes the space before a word
    before = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.encode(context + continuation, add_special_tokens=False)
    same = next(
        (i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before)
    )
    if same == 0 or tokenizer.before:
        begin = list(tokenizer.before) or [first_token(tokenizer)]
        whole, same = begin + whole, same + len(begin)
    scored = len(whole) - same
    if scored < 1:
        raise UserError(f"the choice {continuation!r} adds no token to its context")
    if scored > longest:
        raise UserError(
            f"the choice {continuation!r} has {scored} tokens, but the model supports at "
            f"most {longest}"
        )
    whole = whole[-longest - 1 :]
    return whole, len(whole) - scored


def padded(rows: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert rows to input_ids and targets, int64 [rows, longest].

    Args:
        rows: Pairs of ids and the number of leading ids that are context.
    """
    inputs = [torch.tensor(ids[:-1]) for ids, _ in rows]
    targets = [
        torch.tensor([IGNORE_INDEX] * (context - 1) + ids[context:]) for ids, context in rows
    ]
    padded_targets = pad_sequence(targets, batch_first=True, padding_value=IGNORE_INDEX)
    return pad_sequence(inputs, batch_first=True), padded_targets
