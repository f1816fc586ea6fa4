"""The attention of a chunk by the kernel that takes documents alone: which queries and keys of each
document it is told, against each token's softmax by hand."""

import random
from dataclasses import replace

import pytest
import torch

import megazoo
from megazoo.engine import batch as batches
from megazoo.layers import attention
from megazoo.layers.masks import Packed, masks_of_chunks
from megazoo.models import masks as model_masks
from megazoo.parallel.sequence import SequenceCut
from tests.support.attention import LENGTHS, calls, documents, each_alone
from tests.support.training import (
    MODELS,
    context,
    layout_name,
    make_batch,
    run_in_layout,
    worst_gradient,
)

CPU = torch.device("cpu")


def by_hand(q, k, v, ids, chunk):
    """Each query of the chunk sees those before it of its own document: [rows, heads, chunk,
    size]."""
    outputs = torch.zeros_like(q)
    for row in range(len(q)):
        for place, token in enumerate(chunk):
            seen = [key for key in range(token + 1) if ids[row][key] == ids[row][token]]
            scores = torch.einsum("hd,hkd->hk", q[row, :, place], k[row, :, seen])
            weights = (scores * q.shape[-1] ** -0.5).softmax(-1)
            outputs[row, :, place] = torch.einsum("hk,hkd->hd", weights, v[row, :, seen])
    return outputs


def lengths_drawn(draw: random.Random, sequence: int) -> tuple[int, ...]:
    """Draw lengths of documents that fill a sequence: a few short ones, or a long one."""
    lengths = []
    while sum(lengths) < sequence:
        lengths.append(min(draw.choice((1, 2, 3, 7, sequence)), sequence - sum(lengths)))
    return tuple(lengths)


def rows_of(case: int, sequence: int) -> list[tuple[int, ...]]:
    """Return the lengths of documents in each of three rows, some before, across and after chunks;
    in the first case there is one document a row."""
    draw = random.Random(case)
    return [lengths_drawn(draw, sequence) if case else (sequence,) for _ in range(3)]


@pytest.mark.parametrize("empty", [0, 2], ids=["", "empty ones at the end"])
@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("method", ["allgather", "ulysses"])
def test_a_chunk_attends_as_by_hand(method, cp, case, empty):
    sequence = 6 * cp
    lengths = rows_of(case, sequence)
    ids = [[n for n, size in enumerate(row) for _ in range(size)] for row in lengths]
    flat = torch.tensor([0, *(size for row in lengths for size in row)]).cumsum(0)
    boundaries = torch.cat([flat, flat[-1:].expand(empty)]).int()
    layer = megazoo.layers.CausalSelfAttention(16, 4, 2, ctx=context())
    k, v = torch.randn(2, 3, 2, sequence, 4)
    for rank in range(cp):
        cut = SequenceCut(sequence, cp, rank, method)
        given = {"segments": torch.tensor(ids), "boundaries": boundaries} if case else {}
        masks = masks_of_chunks(cut, 3, torch.float32, CPU, packed=True, **given).masks
        for chunk, mask in zip(cut.queries, masks, strict=True):
            assert isinstance(mask, Packed)
            q = torch.randn(3, 4, len(chunk), 4)
            heads = (x[:, :, : chunk.stop].repeat_interleave(2, dim=1) for x in (k, v))
            expected = by_hand(q, *heads, ids, chunk)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(attention, "varlen_attention", each_alone)
                found = layer._attend_here(q, k[:, :, : chunk.stop], v[:, :, : chunk.stop], mask)
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("method", ["allgather", "ulysses"])
def test_no_rows_need_no_documents(monkeypatch, method):
    """CUDA's kernel refuses none; a replica's batch may have no rows."""
    monkeypatch.setattr(attention, "varlen_attention", None)
    layer = megazoo.layers.CausalSelfAttention(16, 4, 2, ctx=context())
    cut = SequenceCut(8, 2, 1, method)
    masks = masks_of_chunks(cut, 0, torch.float32, CPU, packed=True).masks
    for chunk, mask in zip(cut.queries, masks, strict=True):
        q, k = torch.randn(0, 4, len(chunk), 4), torch.randn(0, 2, chunk.stop, 4)
        assert layer._attend_here(q, k, k, mask).shape == q.shape


def trained(config, layout, packed, several):
    """The loss, each gradient with its place, and how many documents each call of the kernel
    had."""
    calls.clear()
    with pytest.MonkeyPatch.context() as patch:
        if packed:
            real = masks_of_chunks
            patch.setattr(batches, "_takes_boundaries", lambda ctx: True)
            patch.setattr(attention, "varlen_attention", each_alone)
            patch.setattr(attention, "HALF", (torch.float32,))
            always = lambda *args, packed, **how: real(*args, packed=True, **how)  # noqa: E731
            patch.setattr(model_masks, "masks_of_chunks", always)
        ctx = context(**layout)
        model = megazoo.from_config(replace(config, max_positions=32), ctx, seed=3)
        ids, targets = make_batch(0, sequence=15)
        given = documents() if several and ctx.pp_rank == 0 else None
        loss = model.train_batch(ids, targets=targets, document_ids=given, num_microbatches=2)
    tp = ctx.tp_size, ctx.tp_rank
    pieces = {e.name: (e.parameter.grad, e.spec.pieces(*tp)) for e in model.entries()}
    gradients = {n: [(p.box, g[p.index()]) for p in parts] for n, (g, parts) in pieces.items()}
    return loss.item(), gradients, list(calls)


@pytest.mark.parametrize("several", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", dict(cp=2)),
        ("gpt2", dict(cp=2, method="ulysses")),
        ("llama", dict(cp=2, pp=2)),
        ("mpt, learned positions", dict(cp=2, tp=2, sp=True)),
    ],
    ids=lambda part: layout_name(part) if isinstance(part, dict) else part,
)
def test_packed_chunks_train_as_one_process_by_a_mask(ranks, name, layout, several):
    loss, gradients, masked = trained(MODELS[name], {}, False, several)
    assert masked == []
    results = run_in_layout(ranks, in_layout, layout, MODELS[name], several)
    for ours, _, called in results:
        assert abs(ours / loss - 1) < 1e-6
        # rows of 16 tokens, one of padding: 4 rows, or 11 documents and the padding of 3 rows
        assert set(called) == ({14} if several else {len(LENGTHS) // 2})
    worst = worst_gradient([each for _, each, _ in results], gradients)
    assert worst[0] < 1e-5, worst


def in_layout(config, several, layout):
    return trained(config, layout, True, several)
