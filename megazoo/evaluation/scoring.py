"""Texts are scored in every layout: their loss, and the log-likelihoods of choices."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from megazoo.engine.batch import Batch
from megazoo.engine.calls import using_context
from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.pipeline import run_pipeline
from megazoo.errors import UserError
from megazoo.generate.decoding import not_finite
from megazoo.layers.cross_entropy import IGNORE_INDEX
from megazoo.layers.dropout import without_dropout
from megazoo.parallel.agreement import sharing_axis
from megazoo.parallel.axes import Axis
from megazoo.parallel.collectives import all_reduce, broadcast_from_stage
from megazoo.parallel.failure import on_all_ranks
from megazoo.parallel.shares import share_of


class Scores(NamedTuple):
    """Of each row: log_likelihood, float64, the sum of its targets' log-probabilities, in nats;
    tokens, int64, how many they are; greedy, bool, whether each is what greedy choice would have
    taken. All [batch]."""

    log_likelihood: torch.Tensor
    tokens: torch.Tensor
    greedy: torch.Tensor


@torch.no_grad()
@on_all_ranks
def score(model: Any, input_ids: torch.Tensor, targets: torch.Tensor) -> Scores:
    """Return how likely a language model finds the targets of each row.

    input_ids, targets: int64 [batch, sequence], padded on the right; targets[b, s] is the token
    that position s is to predict, or -100 where there is none. Call it with the same inputs on
    every rank of a replica. Replicas with the same rows share them, and each gets the scores of
    all; with rows of its own, each gets theirs. Raises UserError as `Model.forward` does, and if
    the logits are no numbers.
    """
    if model.config.num_labels:
        raise UserError("a classifier does not score tokens")

    def of_rows(outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the log-likelihood, the tokens and greedy of each row: fp64 [batch, 3]."""
        head, targets = model.output_head, batch.targets
        assert targets is not None
        labelled = targets != IGNORE_INDEX
        losses = head.token_losses(outputs, batch)
        best = head.full_outputs(outputs, batch).argmax(dim=-1)
        # what sequence parallelism pads has no logits
        best = F.pad(best, (0, labelled.shape[1] - best.shape[1]))
        greedy = (~labelled | (targets == best)).all(dim=1)
        return torch.stack(
            [-losses.double().sum(1), labelled.double().sum(1), greedy.double()], dim=1
        )

    scores = of_every_row(model, Batch(input_ids, targets=targets), 3, of_rows)
    return Scores(scores[:, 0], scores[:, 1].long(), scores[:, 2].bool())


def of_every_row(
    model: Any,
    batch: Batch,
    columns: int,
    of_rows: Callable[[torch.Tensor, MicroBatch], torch.Tensor],
) -> torch.Tensor:
    """Return numbers of each row, fp64 [rows, columns], the same on every rank that has the rows.

    batch: the rows, the same on every rank of a replica; replicas with the same rows share them,
    context-parallel ranks as replicas. of_rows(outputs, batch): the numbers of a micro-batch's
    rows, fp64 [rows, columns], on the last stage. UserError if they are not finite.
    """
    model.ctx.require_ranks()
    model.ctx.require_no_folded("scoring")
    sharing = sharing_axis(model.ctx, batch.input_ids, batch.targets)
    with using_context(model, model.ctx.cp_as_dp):
        return _of_every_row(model, batch, columns, of_rows, sharing)


def _of_every_row(
    model: Any, batch: Batch, columns: int, of_rows: Callable, sharing: Axis
) -> torch.Tensor:
    assert batch.input_ids is not None
    ctx, rows = model.ctx, len(batch.input_ids)
    if sharing.size > 1:  # refuse, on every rank, what any would
        with without_dropout(model):
            model.engine.micro_batches(batch, 1)
    mine = share_of(range(rows), sharing.size, sharing.rank)
    values = torch.zeros(rows, columns, dtype=torch.float64, device=ctx.device)
    if mine:
        part = slice(mine.start, mine.stop)
        # of each stage a micro-batch, or as many as divide the rows evenly
        count = max(n for n in range(1, min(len(mine), ctx.pp_size) + 1) if len(mine) % n == 0)
        with without_dropout(model):
            targets = None if batch.targets is None else batch.targets[part]
            taken = replace(batch, input_ids=batch.input_ids[part], targets=targets)
            batches = model.engine.micro_batches(taken, count)
            result = run_pipeline(model, batches, global_batch=False, collect=of_rows).collected
        if result is not None:
            values[part] = result
    broadcast_from_stage(values, ctx.placement.last_rank, ctx)
    all_reduce(values, sharing.group)  # each rank has its rows, and zeros
    if not bool(values.isfinite().all()):
        raise not_finite(model.dtype)
    return values


@dataclass
class TextLoss:
    """The loss of texts, with how many documents, bytes and predicted tokens they are. nats: the
    sum of the tokens' losses."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0

    @property
    def loss(self) -> float:
        """The mean over the tokens, in nats."""
        return self.nats / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        """e to the loss; of a loss above 700, which no float could hold, that of 700."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """The texts' losses, in bits, over their bytes: it does not depend on the tokenizer."""
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
) -> TextLoss:
    """Return the loss of every token of every text, each predicted once.

    A text longer than `length` tokens is read in windows of so many, `stride` apart (0: without
    overlap); what a window shares with the one before is context only. The first token follows the
    one that begins texts: bos, or else the end of the document before. batch: windows that are
    scored together. progress(bytes): called when a text has been read.
    """
    if not 0 <= stride <= length:
        raise UserError(f"stride {stride} must be from 1 to the window's {length}, or 0")
    total, waiting, start = TextLoss(), [], first_token(tokenizer)

    def flush() -> None:
        scores = score(model, *padded(waiting))
        total.nats -= float(scores.log_likelihood.sum())
        total.tokens += int(scores.tokens.sum())
        waiting.clear()

    for text in texts:
        ids = [start, *tokenizer.encode(text, add_special_tokens=False, parse_special=False)]
        for window in windows(ids, length, stride or length):
            waiting.append(window)
            if len(waiting) == batch:
                flush()
        size = len(text if isinstance(text, bytes) else text.encode())
        total.documents, total.bytes = total.documents + 1, total.bytes + size
        if progress:
            progress(size)
    if waiting:
        flush()
    return total


def windows(ids: list[int], length: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Yield windows of at most length + 1 ids, and how many ids of each are context only.

    Every id but the first is predicted once, with at least length - stride ids before it where
    there are so many. The last id of a window is predicted, but not read.
    """
    predicted = 1  # ids of which nothing remains to be predicted
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
    """Return for each (context, continuation) the continuation's log-likelihood, its tokens, and
    whether it is the greedy one.

    Evaluation harnesses are built on this. Both are encoded together, so that the boundary is as in
    running text; spaces at the end of the context, and tokens across the boundary, count to the
    continuation. An empty context is the token that begins texts. A context that is too long for
    the model loses its beginning. batch: choices that are scored together. progress: called with
    the number of choices of each batch.
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
    """Return the ids of a context and its continuation, `longest` + 1 at most, and how many of them
    are the context's."""
    text = context.rstrip()  # the space before a word is the word's, in most vocabularies
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
        raise UserError(f"the choice {continuation!r} has no token of its own")
    if scored > longest:
        raise UserError(
            f"the choice {continuation!r} has {scored} tokens, the model takes {longest}"
        )
    whole = whole[-longest - 1 :]
    return whole, len(whole) - scored


def first_token(tokenizer: Any) -> int:
    """Return the token that begins texts: bos, or else the end of the document before."""
    return tokenizer.eod if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def padded(rows: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input_ids and targets, int64 [rows, longest], of rows of ids, each with how many of
    them are context."""
    inputs = [torch.tensor(ids[:-1]) for ids, _ in rows]
    targets = [
        torch.tensor([IGNORE_INDEX] * (context - 1) + ids[context:]) for ids, context in rows
    ]
    padded_targets = pad_sequence(targets, batch_first=True, padding_value=IGNORE_INDEX)
    return pad_sequence(inputs, batch_first=True), padded_targets
