"""Build the batches of a replica from samples, ahead of their use."""

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from megazoo.constants import IGNORE_INDEX
from megazoo.data.order import Blend
from megazoo.data.preferences import rows_of
from megazoo.data.samples import LabelledRow, Sample
from megazoo.errors import UserError
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.sequence import SequenceCut, padded_length

AHEAD = 2  # batches prefetched per worker
# Values that `Batches` does not move to the device: train_batch reads document_ids on the CPU, and
# sequence_length is an int.
NOT_MOVED = ("document_ids", "sequence_length")


def documents_of(tokens: torch.Tensor, eod: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's document number within its sample, and its position in that document.

    Args:
        tokens: int64 [batch, sequence].
        eod: the token that ends a document. It belongs to the document that it ends.

    Returns:
        Documents and positions, both int64 [batch, sequence].
    """
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[:, 1:] = tokens[:, :-1] == eod
    documents = starts.long().cumsum(1)
    return documents, _positions(documents)


def _positions(documents: torch.Tensor) -> torch.Tensor:
    """Return the position of each token in its document."""
    starts = torch.zeros_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return place - (place * starts).cummax(1).values


class Batches:
    """Builds this replica's part of each global batch, as arguments of `train_batch` and
    `eval_batch`.

    Each global batch is split into dp equal parts, and replica r uses part r. Context-parallel
    ranks further split each row into chunks.

    Args:
        blend: the samples. Pass it only on the first and the last stage. On other stages (None) the
            batch is empty, and the first stage sends them its shape.
        global_batch: number of samples in a global batch.
        ctx: parallel context of this rank.
        pad_token_id: token that pads the rows of a classifier and marks where they end.
        mark_padding: give the padding of uneven rows document number -1, also if each row is one
            document. Layers that count tokens need it; attention without it is faster.
        end: number of samples after which the data ends. The last batch has only the remaining
            samples, and rows without labels up to a multiple of the replicas' micro-batches. None:
            the data is repeated.
        micro_batch: number of rows of a micro-batch.
        size_at: returns the number of samples in the global batch after a number of samples, if
            it varies.
    """

    def __init__(
        self,
        blend: Blend | None,
        global_batch: int,
        ctx: ParallelContext,
        pad_token_id: int | None = None,
        mark_padding: bool = False,
        end: int | None = None,
        micro_batch: int = 1,
        size_at: Callable[[int], int] | None = None,
    ):
        self.blend, self.global_batch, self.ctx, self.device = blend, global_batch, ctx, ctx.device
        self.size_at = size_at or (lambda _: global_batch)
        self.pad_token_id, self.mark_padding = pad_token_id, mark_padding
        self.end, self.micro_batch = end, micro_batch

    def starts(self, batches: int) -> range:
        """Return the number of samples before each of at most `batches` batches, from the first
        sample to the end of the data."""
        last = batches * self.global_batch
        return range(0, last if self.end is None else min(last, self.end), self.global_batch)

    def rows_after(self, consumed: int) -> int:
        """Return the number of rows of this replica in the batch after `consumed` samples."""
        if self.end is None:
            return self.size_at(consumed) // self.ctx.dp_size
        left = min(self.global_batch, self.end - consumed)
        return math.ceil(left / (self.ctx.dp_size * self.micro_batch)) * self.micro_batch

    def __call__(self, consumed: int) -> dict[str, torch.Tensor | int]:
        """Return the batch that follows the first `consumed` samples.

        It is a dictionary with (for preferences, a sample has two rows):

        - input_ids, targets: int64 [batch, longest sample], padded on the right. No token attends
          to the padding. With context parallelism, only this rank's chunks.
        - document_ids: int64 [batch, longest sample], only if tokens must not attend to other
          documents, or if padding is marked and the rows have different lengths. With context
          parallelism they are not split, because attention needs the documents of the complete row.
        - position_ids: the same shape, only if tokens must not attend to other documents.
        - sequence_length: length of the longest sample, only with context parallelism.
        - the named arrays of the samples on the last stage, [batch, longest, ...], padded with 0.
          They are not split.

        For a classifier: input_ids and, if padding is marked, document_ids, neither split by
        context parallelism, and labels, int64 [batch] or float32 [batch, numbers].
        """
        if self.blend is None:
            return {}
        rows = self.rows_after(consumed)
        first = consumed + self.ctx.dp_rank * rows
        samples = self.blend.samples(first, rows)
        if self.end is not None:
            real = max(0, self.end - first)
            samples = [*samples[:real], *map(_unlabelled, rows_of(samples[real:]))]
        samples = rows_of(samples)
        labelled = isinstance(samples[0], LabelledRow)
        batch: dict[str, Any] = (
            _padded_rows(samples, self.pad_token_id) if labelled else _padded(samples)
        )
        lengths = [len(sample.input_ids) for sample in samples]
        if self.mark_padding and len(set(lengths)) > 1 and "document_ids" not in batch:
            is_token = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
            batch["document_ids"] = torch.where(is_token, 0, -1)
        length, cut = batch["input_ids"].shape[1], self.ctx.cp_size > 1 and not labelled
        if cut:
            batch |= _own_chunks(batch, self.ctx)
        if not labelled and self.ctx.pp_rank == self.ctx.placement.last_rank:
            for name in samples[0].named:
                arrays = [torch.from_numpy(sample.named[name]) for sample in samples]
                batch[name] = pad_sequence(arrays, batch_first=True)
        if self.device.type == "cuda":
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return {**batch, "sequence_length": length} if cut else batch

    def tokens(self, consumed: int) -> int:
        """Return the number of tokens in the global batch that follows `consumed` samples.

        Padding is not counted. 0 without a blend.
        """
        return self.blend.tokens(consumed, self.size_at(consumed)) if self.blend else 0

    def positions(self, consumed: int) -> list[dict | None]:
        """Return the position of each streamed source after `consumed` samples.

        See `Blend.positions`. Empty without a blend.
        """
        return self.blend.positions(consumed) if self.blend else []

    def ahead(
        self, consumed: Sequence[int], workers: int
    ) -> Generator[dict[str, torch.Tensor | int], None, None]:
        """Yield the batch that follows each number of samples in `consumed`, on the device.

        Only document_ids stay on the CPU: train_batch reads them before it moves them. Threads
        suffice, because building a batch only copies from memory-mapped files.

        Args:
            consumed: numbers of samples before each batch.
            workers: number of threads that build batches ahead. 0: build each batch on request.
                Streamed data is read in order by at most one thread.
        """
        if self.blend and self.blend.streamed:
            workers = min(workers, 1)
        if not workers:
            yield from map(self._moved, map(self, consumed))
            return
        with ThreadPoolExecutor(workers) as pool:
            waiting = deque()
            try:
                for number in consumed:
                    waiting.append(pool.submit(self, number))
                    if len(waiting) > AHEAD * workers:
                        yield self._moved(waiting.popleft().result())
                while waiting:
                    yield self._moved(waiting.popleft().result())
            finally:
                for future in waiting:
                    future.cancel()

    def _moved(self, batch: dict[str, Any]) -> dict[str, Any]:
        moved = {
            name: value.to(self.device, non_blocking=True)
            for name, value in batch.items()
            if name not in NOT_MOVED
        }
        return batch | moved


def _unlabelled(sample: Sample | LabelledRow) -> Sample | LabelledRow:
    """Return a sample without a loss: targets of -100, or NaN for the numbers of a label."""
    if isinstance(sample, Sample):
        return sample._replace(targets=np.full_like(sample.targets, IGNORE_INDEX))
    is_number = np.issubdtype(sample.label.dtype, np.floating)
    return sample._replace(label=np.full_like(sample.label, np.nan if is_number else IGNORE_INDEX))


def _own_chunks(batch: dict[str, torch.Tensor], ctx: ParallelContext) -> dict[str, torch.Tensor]:
    """Return this context-parallel rank's chunks of input_ids and targets: int64 [batch, padded /
    cp]. Both are padded to a length that can be split."""
    length = batch["input_ids"].shape[1]
    padded = padded_length(length, ctx)
    cut, padding = SequenceCut.of(padded, ctx), (0, padded - length)
    assert cut  # cp > 1
    return {
        "input_ids": cut.own(F.pad(batch["input_ids"], padding)),
        "targets": cut.own(F.pad(batch["targets"], padding, value=IGNORE_INDEX)),
    }


def _padded(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Stack samples as the rows of a batch, padded to the longest."""
    lengths = {len(sample.input_ids) for sample in samples}
    separate = any(sample.documents is not None for sample in samples)
    if len(lengths) == 1 and not separate:
        (length,) = lengths
        rows = {n: [getattr(sample, n) for sample in samples] for n in ("input_ids", "targets")}
        return {
            name: torch.from_numpy(np.concatenate(arrays).reshape(len(arrays), length))
            for name, arrays in rows.items()
        }
    shape = len(samples), max(lengths)
    batch = {"input_ids": np.zeros(shape, np.int64), "targets": np.full(shape, IGNORE_INDEX)}
    if separate:
        batch["document_ids"] = np.full(shape, -1)  # padding attends only to padding
    for row, sample in enumerate(samples):
        length = len(sample.input_ids)
        batch["input_ids"][row, :length] = sample.input_ids
        batch["targets"][row, :length] = sample.targets
        if separate:
            documents = 0 if sample.documents is None else sample.documents
            batch["document_ids"][row, :length] = documents
    batch = {name: torch.from_numpy(array) for name, array in batch.items()}
    if separate:
        batch["position_ids"] = _positions(batch["document_ids"])
    return batch


def _padded_rows(rows: list[LabelledRow], pad_token_id: int | None) -> dict[str, torch.Tensor]:
    """Pad the rows of a classifier to the longest, and stack their labels."""
    if pad_token_id is None:
        raise UserError("a classifier's rows need a pad_token_id, to find where each ends")
    longest = max(len(row.input_ids) for row in rows)
    input_ids = np.full((len(rows), longest), pad_token_id)
    for number, row in enumerate(rows):
        input_ids[number, : len(row.input_ids)] = row.input_ids
    labels = np.stack([row.label for row in rows])
    return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
