"""The batches that a check trains on: plain rows, packed documents and padding take turns."""

import torch

from megazoo.layers.cross_entropy import IGNORE_INDEX

ROWS = 24  # of the global batch: for 1, 2, 3, 4, 6, 8, 12 or 24 replicas
SEQUENCE = 16
MICRO_BATCHES = 4
# What the batches of the first steps are, one after the other, and then again.
KINDS = ("plain rows", "packed documents", "padding")
DOCUMENTS = (5, 3, 7, 1, 9)  # tokens of the packed documents, in turns


def make_batch(step: int, vocab: int, longest: int) -> dict[str, torch.Tensor]:
    """Return the global batch of a step, as `Model.train_batch` takes it: tensors [ROWS, sequence].

    Plain rows have labels, which the model is to shift; the others have targets, which are shifted.
    A row keeps the more of them the later it comes, so that micro-batches differ widely. longest:
    tokens of the model's longest sequence.
    """
    generator, kind = torch.Generator().manual_seed(1000 + step), KINDS[step % len(KINDS)]
    sequence = min(SEQUENCE, longest)
    if kind == "padding" and sequence > 1:
        sequence -= 1 - sequence % 2  # an odd length, which ranks can't share as it is
    tokens = torch.randint(0, vocab, (ROWS, sequence + 1), generator=generator)
    share = torch.arange(1, ROWS + 1)[:, None] / ROWS
    keep = torch.rand(ROWS, sequence, generator=generator) < share
    more = {}
    if kind == "packed documents":
        more = _documents(sequence)
    elif kind == "padding":
        more = {"attention_mask": _padding(sequence)}
        keep &= more["attention_mask"].bool()
    if kind == "plain rows":
        labels = tokens[:, :-1].masked_fill(~keep, IGNORE_INDEX)
        return {"input_ids": tokens[:, :-1], "labels": labels}
    targets = tokens[:, 1:].masked_fill(~keep, IGNORE_INDEX)
    return {"input_ids": tokens[:, :-1], "targets": targets, **more}


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Return the targets of labels [rows, sequence]: what each position is to predict."""
    nothing = labels.new_full((len(labels), 1), IGNORE_INDEX)
    return torch.cat([labels[:, 1:], nothing], dim=1)


def micro_batches_of(dp: int) -> int:
    """Return how many micro-batches a replica cuts its rows into, MICRO_BATCHES at most."""
    return max(count for count in range(1, MICRO_BATCHES + 1) if ROWS // dp % count == 0)


def _documents(sequence: int) -> dict[str, torch.Tensor]:
    """Return documents of odd lengths, other ones in each row, and the positions in them."""
    rows = []
    for row in range(ROWS):
        lengths = [DOCUMENTS[(row + n) % len(DOCUMENTS)] for n in range(sequence)]
        numbers = torch.arange(sequence).repeat_interleave(torch.tensor(lengths))
        rows.append(numbers[:sequence])
    documents = torch.stack(rows)
    place = torch.arange(sequence).expand(ROWS, -1)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = (place * starts).cummax(dim=1).values  # of the document that a token is in
    return {"document_ids": documents, "position_ids": place - first}


def _padding(sequence: int) -> torch.Tensor:
    """Return 1 for tokens and 0 for padding: in the first rows on both sides, so that a
    context-parallel rank has nothing else; then in turns on the left, on the right, and nowhere."""
    place, row = torch.arange(sequence), torch.arange(ROWS)[:, None]
    quarter = (sequence + 1) // 4
    left, right = place >= quarter, place < 3 * quarter
    both = row < ROWS // MICRO_BATCHES
    mask = (left | (row % 3 == 1) | (row % 3 == 2)) & (right | (row % 3 == 0) | (row % 3 == 2))
    return torch.where(both, left & right, mask).long()
