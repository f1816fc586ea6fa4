"""What a batch of users becomes: labels are shifted within their documents."""

import pytest
import torch

import megazoo
from tests.support.sampling import marked_slow
from tests.support.training import MODELS, context, layout_name, make_batch, run_in_layout

LENGTHS = [(9, 7), (1, 15), (4, 4, 8), (16,)]
LAYOUTS = [{}, dict(pp=2), dict(tp=2, cp=2), dict(cp=2), dict(dp=2), dict(tp=2, pp=2)]


def documents() -> torch.Tensor:
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS]
    return torch.stack(rows)


def losses_by_labels_and_by_targets(layout) -> list[tuple[float, float]]:
    """Of every call that takes labels: its loss, and that with targets shifted by hand."""
    ctx, ids, documents_of = context(**layout), make_batch(0, rows := 4)[0], documents()
    targets = torch.full_like(ids, -100)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            end = start + length
            targets[row, start : end - 1] = ids[row, start + 1 : end]
            start = end
    assert (targets != -100).sum() == rows * 16 - sum(map(len, LENGTHS))
    own = slice(ctx.dp_rank * rows // ctx.dp_size, (ctx.dp_rank + 1) * rows // ctx.dp_size)
    given = {"input_ids": ids[own], "document_ids": documents_of[own]}
    model = megazoo.from_config(MODELS["llama"], ctx, seed=3)
    found = []
    for call in (model.train_batch, model.eval_batch):
        by = [
            call(**given, **labels, num_microbatches=2).item()
            for labels in ({"labels": ids[own]}, {"targets": targets[own]})
        ]
        found.append(tuple(by))
    if ctx.dp_size == 1:
        found.append((model(**given, labels=ids).loss.item(), found[0][1]))
    return found


@pytest.mark.parametrize(
    "layout", marked_slow(LAYOUTS, lambda number, _: number > 2, name=layout_name)
)
def test_no_label_is_of_another_document(ranks, layout):
    for found in run_in_layout(ranks, losses_by_labels_and_by_targets, layout):
        for by_labels, by_targets in found:
            assert by_labels == pytest.approx(by_targets, rel=1e-5)


def test_a_label_on_padding_counts_and_targets_are_taken_as_given():
    ids = torch.arange(8).view(1, 8)
    model = megazoo.from_config(MODELS["llama"], seed=3)
    mask, documents_of = (ids < 6).long(), (ids > 3).long()
    shifted = torch.tensor([[1, 2, 3, -100, 5, 6, 7, -100]])
    given = {"attention_mask": mask, "document_ids": documents_of}
    by_labels = model.train_batch(ids, labels=ids, **given)
    assert by_labels == model.train_batch(ids, targets=shifted, **given)
    across = shifted.clone()
    across[0, 3] = 4
    assert by_labels != model.train_batch(ids, targets=across, **given)
