"""Batches that a sequence's cut goes through: of documents, with padding, of lengths that don't
divide; and a probe of what a token may change."""

import torch

from tests.support import training

VOCABULARY = 61
KINDS = ("plain", "packed", "padded", "odd")
ROWS, MICRO_BATCHES = 4, 2
TOKENS = 13  # of the rows of batch_of: not a multiple of 2 cp
DOCUMENTS = ((11, 7, 13), (1, 21, 9), (5, 5, 5, 5, 11), (31,))  # of each row of packed ones


def long_batch_of(step: int, kind: str = "plain") -> dict[str, torch.Tensor]:
    """A global batch: rows of 32 tokens, of 31 packed ones or with padding, or of 29.

    Of the first micro-batch with padding, cp rank 0 of any number has padding only.
    """
    generator = torch.Generator().manual_seed(100 + step)
    sequence = {"plain": 32, "packed": 31, "padded": 31, "odd": 29}[kind]
    tokens = torch.randint(0, VOCABULARY, (ROWS, sequence + 1), generator=generator)
    share = torch.arange(1, ROWS + 1)[:, None] / ROWS
    keep = torch.rand(ROWS, sequence, generator=generator) < share
    more = {}
    if kind == "packed":
        numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in DOCUMENTS]
        places = [torch.cat([torch.arange(length) for length in row]) for row in DOCUMENTS]
        more = {"document_ids": torch.stack(numbers), "position_ids": torch.stack(places)}
    if kind == "padded":
        mask = torch.ones(ROWS, sequence, dtype=torch.int64)
        mask[:2, :8] = mask[:2, 24:] = mask[2, :9] = mask[3, 22:] = 0
        keep, more = keep & mask.bool(), {"attention_mask": mask}
    targets = tokens[:, 1:].masked_fill(~keep, -100)
    return {"input_ids": tokens[:, :-1], "targets": targets, **more}


def batch_of(step: int, kind: str = "plain") -> dict:
    """A global batch of 13 tokens a row with uneven labels. kind has any of these words: documents,
    restarting (their positions), padding (on both sides), positions."""
    ids, targets = training.make_batch(step, ROWS, TOKENS)
    batch = {"input_ids": ids, "targets": targets}
    place = torch.arange(TOKENS).expand(ROWS, TOKENS)
    if "documents" in kind:
        starts = torch.tensor([[3, 4, 11], [1, 7, 9], [6, 7, 12], [2, 5, 8]])
        batch["document_ids"] = (place[..., None] >= starts[:, None]).sum(-1)
    if "restarting" in kind:
        earlier = (place[..., None] >= starts[:, None]) * starts[:, None]
        batch["position_ids"] = place - earlier.amax(-1)
    if "padding" in kind:  # on the right, on the left, a whole half, none
        ends, begins = torch.tensor([[5], [13], [6], [13]]), torch.tensor([[0], [8], [0], [0]])
        mask = ((place < ends) & (place >= begins)).long()
        batch["attention_mask"] = mask
        batch["targets"] = targets.masked_fill(mask == 0, -100)
    if "positions" in kind:
        batch["position_ids"] = (place * torch.tensor([[1], [1], [0], [1]])).flip(1)
    return batch


def rows_of_replica(tensors: dict, ctx) -> dict:
    return {name: training.replica_rows(tensor, ctx) for name, tensor in tensors.items()}


# The probe: a row of three documents, of which a token of the first is another one.
LENGTHS, CHANGED = (11, 7, 13), 4


def rows_of_the_probe() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The row before and after the change, and where its documents are."""
    ids = torch.randint(0, VOCABULARY, (1, 31), generator=torch.Generator().manual_seed(5))
    other = ids.clone()
    other[0, CHANGED] = (ids[0, CHANGED] + 1) % VOCABULARY
    given = {
        "document_ids": torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None],
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
    }
    return ids, other, given


def positions_that_differ(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    return (before != after)[0].any(-1).nonzero()[:, 0].tolist()
