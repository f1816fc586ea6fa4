"""The batches of a check: plain rows, packed documents and padding alternate."""

import torch

from megazoo.constants import IGNORE_INDEX

ROWS = 24  # rows of the global batch: divisible by 1, 2, 3, 4, 6, 8, 12 or 24 replicas
SEQUENCE = 16
MICRO_BATCHES = 4
# Kinds of batches, in the order of the steps; repeated after the last one.
KINDS = ("plain rows", "packed documents", "padding")
DOCUMENTS = (5, 3, 7, 1, 9)  # lengths of packed documents in tokens, repeated


def make_batch(
    step: int, vocab: int, longest: int, rows_together: int = 1
) -> dict[str, torch.Tensor]:
    """Return the global batch of a step.

    Plain rows have labels, which the model shifts. The other kinds have targets, which are shifted
    already. Later rows have more labelled tokens, so that micro-batches differ widely.

    Args:
        step: Number of the step, from 0.
        vocab: Vocabulary size.
        longest: Maximum sequence length of the model, in tokens.
        rows_together: Number of rows, or of documents of a packed row, that belong together.

    Returns:
        Arguments of `Model.train_batch`: tensors [rows, sequence].
    """
    generator, kind = torch.Generator().manual_seed(1000 + step), KINDS[step % len(KINDS)]
    sequence, rows = min(SEQUENCE, longest), ROWS * rows_together
    if kind == "padding" and sequence > 1:
        sequence -= 1 - sequence % 2  # an odd length, so that ranks must pad the sequence
    tokens = torch.randint(0, vocab, (rows, sequence + 1), generator=generator)
    share = torch.arange(1, rows + 1)[:, None] / rows
    keep = torch.rand(rows, sequence, generator=generator) < share
    more = {}
    if kind == "packed documents":
        more = _documents(rows, sequence, rows_together)
    elif kind == "padding":
        more = {"attention_mask": _padding(rows, sequence)}
        keep &= more["attention_mask"].bool()
    if kind == "plain rows":
        labels = tokens[:, :-1].masked_fill(~keep, IGNORE_INDEX)
        return {"input_ids": tokens[:, :-1], "labels": labels}
    targets = tokens[:, 1:].masked_fill(~keep, IGNORE_INDEX)
    return {"input_ids": tokens[:, :-1], "targets": targets, **more}


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Convert labels [rows, sequence] to targets: the token to predict at each position."""
    nothing = labels.new_full((len(labels), 1), IGNORE_INDEX)
    return torch.cat([labels[:, 1:], nothing], dim=1)


def micro_batches_of(dp: int) -> int:
    """Return the number of micro-batches per replica, at most MICRO_BATCHES."""
    return max(count for count in range(1, MICRO_BATCHES + 1) if ROWS // dp % count == 0)


def _documents(count: int, sequence: int, together: int) -> dict[str, torch.Tensor]:
    """Return document ids and positions. The document lengths are odd and differ between rows. The
    number of documents of a row is a multiple of `together`."""
    rows = []
    for row in range(count):
        lengths = [DOCUMENTS[(row + n) % len(DOCUMENTS)] for n in range(sequence)]
        numbers = torch.arange(sequence).repeat_interleave(torch.tensor(lengths))
        numbers = numbers[:sequence]
        whole = (int(numbers[-1]) + 1) // together * together
        if not whole:
            whole, numbers = together, torch.arange(sequence) * together // sequence
        rows.append(numbers.clamp(max=whole - 1))
    documents = torch.stack(rows)
    place = torch.arange(sequence).expand(count, -1)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = (place * starts).cummax(dim=1).values  # first position of each token's document
    return {"document_ids": documents, "position_ids": place - first}


def _padding(rows: int, sequence: int) -> torch.Tensor:
    """Return an attention mask: 1 for tokens, 0 for padding. The first rows are padded on both
    sides, so that a context-parallel rank has only padding. The other rows alternate: left, right,
    none."""
    place, row = torch.arange(sequence), torch.arange(rows)[:, None]
    quarter = (sequence + 1) // 4
    left, right = place >= quarter, place < 3 * quarter
    both = row < rows // MICRO_BATCHES
    mask = (left | (row % 3 == 1) | (row % 3 == 2)) & (right | (row % 3 == 0) | (row % 3 == 2))
    return torch.where(both, left & right, mask).long()
