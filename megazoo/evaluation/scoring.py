"""Scoring: the loss of texts, and the log-likelihoods of choices, in every layout."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from megazoo.engine.batch import Batch
from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.pipeline import run_pipeline
from megazoo.errors import UserError
from megazoo.generate.generate import share_of
from megazoo.layers.cross_entropy import IGNORE_INDEX
from megazoo.parallel.collectives import all_reduce, broadcast_from_stage
from megazoo.parallel.failure import together


class Scores(NamedTuple):
    """Of each row: log_likelihood, float64, the sum of its targets' log-probabilities, in nats;
    tokens, int64, how many they are; greedy, bool, whether each is what greedy choice would have
    taken. All [batch], the same on every rank."""

    log_likelihood: torch.Tensor
    tokens: torch.Tensor
    greedy: torch.Tensor


@torch.no_grad()
@together
def score(model, input_ids: torch.Tensor, targets: torch.Tensor) -> Scores:
    """How likely a language model finds the targets of each row.

    input_ids, targets: int64 [batch, sequence], padded on the right; targets[b, s] is the token
    that position s is to predict, or -100 where there is none. Call it with the same inputs on
    every rank: replicas share the rows, and each stage works on one part of them while another
    travels. UserError as in `Model.forward`.
    """
    if model.num_labels:
        raise UserError("a classifier does not score tokens")
    ctx, rows = model.ctx, len(input_ids)
    if ctx.dp_size > 1:  # refuse, on every rank, what any would
        with model.without_dropout():
            model.micro_batches(Batch(input_ids, targets=targets), 1)
    mine = share_of(rows, ctx.dp_size, ctx.dp_rank)
    scores = torch.zeros(rows, 3, dtype=torch.float64, device=ctx.device)

    def of_rows(outputs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        losses, labelled = model.token_losses(outputs, batch), batch.targets != IGNORE_INDEX
        best = model.whole_logits(outputs, batch).argmax(dim=-1)
        # the padding of sequence parallelism
        best = F.pad(best, (0, labelled.shape[1] - best.shape[1]))
        greedy = (~labelled | (batch.targets == best)).all(dim=1)
        return torch.stack(
            [-losses.double().sum(1), labelled.double().sum(1), greedy.double()], dim=1
        )

    count = mine.stop - mine.start
    if count:
        parts = max(n for n in range(1, min(count, ctx.pp_size) + 1) if count % n == 0)
        with model.without_dropout():
            batches = model.micro_batches(Batch(input_ids[mine], targets=targets[mine]), parts)
            result = run_pipeline(model, batches, global_batch=False, collect=of_rows).collected
        if result is not None:
            scores[mine] = result
    broadcast_from_stage(scores, ctx.pp_size - 1, ctx)
    all_reduce(scores, ctx.dp_group)  # each replica has its rows, and zeros
    return Scores(scores[:, 0], scores[:, 1].long(), scores[:, 2].bool())


@dataclass
class TextLoss:
    """The loss of texts. documents, tokens (that were predicted) and bytes; nats: the sum of the
    tokens' losses."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / max(self.bytes, 1)


def evaluate_texts(
    model,
    tokenizer,
    texts: Iterable[str | bytes],
    *,
    length: int,
    stride: int = 0,
    batch: int = 8,
    progress=None,
) -> TextLoss:
    """The loss of every token of every text, each predicted once.

    A text longer than `length` tokens is read in windows of so many, `stride` apart (0: without
    overlap); what a window shares with the one before is context only. The first token follows the
    one that begins texts: bos, or else the end of the document before. batch: windows at once.
    progress(bytes): called as texts are done.
    """
    if not 0 <= stride <= length:
        raise UserError(f"stride {stride} must be from 1 to the window's {length}, or 0")
    total, waiting = TextLoss(), []
    start = tokenizer.eod if tokenizer.bos_token_id is None else tokenizer.bos_token_id

    def flush() -> None:
        scores = score(model, *_padded(waiting))
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
    """Windows of at most length + 1 ids, the last of which is only predicted, and how many of each
    are context: every id but the first is predicted once, with at least length - stride before it
    where there are so many."""
    predicted = 1  # ids of which nothing remains to be predicted
    while predicted < len(ids):
        end = min(max(predicted - 1 + stride, length) + 1, len(ids))
        first = max(0, end - length - 1)
        yield ids[first:end], predicted - first
        predicted = end


def score_choices(
    model, tokenizer, requests: list[tuple[str, str]], *, batch: int = 8
) -> list[tuple[float, int, bool]]:
    """For each (context, continuation): the continuation's log-likelihood, its tokens, and whether
    it is the greedy one.

    The primitive of evaluation harnesses. Both are encoded together, so that the boundary is as in
    running text; spaces at the end of the context, and tokens across the boundary, count to the
    continuation. An empty context is the token that begins texts. A context that is too long for
    the model loses its beginning.
    """
    rows, longest = [], model.longest_sequence(model.config)
    for context, continuation in requests:
        begin = list(tokenizer.before) or [
            tokenizer.eod if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        ]
        text = context.rstrip()  # the space before a word is the word's, in most vocabularies
        before, whole = (
            tokenizer.encode(part, add_special_tokens=False)
            for part in (text, context + continuation)
        )
        same = next(
            (i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before)
        )
        if same == 0 or tokenizer.before:
            whole, same = begin + whole, same + len(begin)
        scored = len(whole) - same
        if scored < 1 or scored > longest:
            what = (
                "has no token of its own"
                if scored < 1
                else f"has {scored} tokens, the model takes {longest}"
            )
            raise UserError(f"the choice {continuation!r} {what}")
        whole = whole[-longest - 1 :]
        rows.append((whole, len(whole) - scored))
    results: list = []
    for first in range(0, len(rows), batch):
        scores = score(model, *_padded(rows[first : first + batch]))
        results += zip(
            scores.log_likelihood.tolist(),
            scores.tokens.tolist(),
            scores.greedy.tolist(),
            strict=True,
        )
    return results


def _padded(rows: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and targets, int64 [rows, longest], of rows with so many ids of context each."""
    inputs = [torch.tensor(ids[:-1]) for ids, _ in rows]
    targets = [
        torch.tensor([IGNORE_INDEX] * (context - 1) + ids[context:]) for ids, context in rows
    ]
    return pad_sequence(inputs, batch_first=True), pad_sequence(
        targets, batch_first=True, padding_value=IGNORE_INDEX
    )
