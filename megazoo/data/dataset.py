"""Packed samples of a stream of tokens, and the order in which training sees them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megazoo.data.corpus import standard_library
from megazoo.data.indexed import IndexedTokens
from megazoo.errors import UserError
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.random import derive_seed

SPLIT_SEED = 1234  # which documents are held out never depends on the run


@dataclass(frozen=True)
class PackedDataset:
    """Documents end to end, cut into samples of seq_length + 1 tokens that share one token with the next.

    tokens: the stream, any unsigned integer dtype. A tail shorter than a sample is left out.
    """

    tokens: np.ndarray
    seq_length: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_length)

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.seq_length
        return self.tokens[start : start + self.seq_length + 1]


def open_datasets(data: str, tokenizer, split: str, seq_length: int) -> tuple[PackedDataset, PackedDataset]:
    """The training and the validation dataset.

    data: "stdlib", or the prefix of token files, of which the first documents are for training and the last for
    validation; they stay in their files, mapped into memory. split: shares by document, such as "95,5".
    """
    shares = check_data(data, split)
    if data == "stdlib":
        documents = standard_library()
        order = np.random.default_rng(SPLIT_SEED).permutation(len(documents))
        cut = round(len(documents) * shares[0])
        parts = (sorted(order[:cut]), sorted(order[cut:]))
        streams = [_stream([documents[i] for i in part], tokenizer) for part in parts]
    else:
        tokens = IndexedTokens(data)
        count = len(tokens.documents) - 1
        cut = round(count * shares[0])
        streams = [tokens.stream(0, cut), tokens.stream(cut, count)]
    datasets = [PackedDataset(stream, seq_length) for stream in streams]
    for name, dataset, share in zip(("training", "validation"), datasets, shares, strict=True):
        if share and not len(dataset):
            raise UserError(f"{data}: split {split} leaves no {name} sample of {seq_length} tokens")
    return tuple(datasets)


def check_data(data: str, split: str) -> tuple[float, float]:
    """The shares of training and validation, adding up to 1; UserError if there is no such data or split."""
    if data != "stdlib" and not Path(f"{data}.idx").is_file():
        what = "the text of Python's standard library, or the prefix of token files, PREFIX.bin and PREFIX.idx"
        raise UserError(f"unknown data {data!r}: there is stdlib, {what}")
    try:
        train, valid = (float(share) for share in split.split(","))
    except ValueError:
        train = valid = -1.0
    if not (0 < train < np.inf and 0 <= valid < np.inf):
        raise UserError(f"split {split!r} is not two shares such as 95,5 for training and validation")
    return train / (train + valid), valid / (train + valid)


def _stream(documents: list[bytes], tokenizer) -> np.ndarray:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    end = np.array([tokenizer.eod], dtype)
    # A special token's name in a document is text.
    texts = (tokenizer.encode_to_numpy(text, parse_special=False).astype(dtype, copy=False) for text in documents)
    return np.concatenate([part for text in texts for part in (text, end)] or [end])


def documents_of(tokens: torch.Tensor, eod: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which document of its sample each token is in, and its position there: int64, like tokens, [batch, sequence].

    A token `eod` ends a document and belongs to it.
    """
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[:, 1:] = tokens[:, :-1] == eod
    place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return starts.long().cumsum(1), place - (place * starts).cummax(1).values


class SampleOrder:
    """The order of samples: a function of (seed, epoch, consumed samples) alone, whatever the layout or the run.

    Each epoch is a permutation of its own; an epoch's end and the next one's start may share a batch.
    """

    def __init__(self, samples: int, seed: int):
        self.samples, self.seed = samples, seed
        self._epoch, self._permutation = -1, np.empty(0, np.int64)

    def __call__(self, consumed: int) -> int:
        """The index of the sample that comes after `consumed` others."""
        epoch, position = divmod(consumed, self.samples)
        if epoch != self._epoch:
            generator = np.random.default_rng(derive_seed(self.seed, "samples", epoch))
            self._epoch, self._permutation = epoch, generator.permutation(self.samples)
        return int(self._permutation[position])


class Batches:
    """This replica's part of the global batches, as the arguments of `train_batch` and `eval_batch`.

    Only the stages that use them should be given a dataset: with None the arguments are only the batch's shape.
    Replica r takes the r-th of dp equal parts of every global batch. eod: the token that ends a document, if documents
    are not to see each other.
    """

    def __init__(
        self,
        dataset: PackedDataset | None,
        order,
        global_batch: int,
        seq_length: int,
        ctx: ParallelContext,
        eod: int | None = None,
    ):
        self.dataset, self.order, self.device, self.eod = dataset, order, ctx.device, eod
        self.global_batch, self.shape = global_batch, (global_batch // ctx.dp_size, seq_length)
        self.first = ctx.dp_rank * self.shape[0]

    def __call__(self, consumed: int) -> dict:
        """The batch that comes after `consumed` samples: input_ids and targets, int64 [batch, sequence], and shape."""
        if self.dataset is None:
            return {"shape": self.shape}
        indices = range(consumed + self.first, consumed + self.first + self.shape[0])
        samples = np.stack([self.dataset[self.order(i)] for i in indices]).astype(np.int64)
        tokens = torch.from_numpy(samples).to(self.device)
        batch = {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:], "shape": self.shape}
        if self.eod is not None:
            batch["document_ids"], batch["position_ids"] = documents_of(batch["input_ids"], self.eod)
        return batch
