"""Packed documents by a kernel that takes each alone, in whole sequences and in chunks: what it is
told, and the same results as by a mask and by hand. The kernel is CUDA's; in its place stands a
loop over the documents."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from megazoo.engine import batch as batches
from megazoo.layers import CausalSelfAttention, Packed, attend, segment_mask
from megazoo.layers.masks import masks_of_chunks
from megazoo.models import masks as model_masks
from megazoo.parallel.sequence import SequenceCut
from tests.support.attention import LENGTHS, attentive, calls, documents, each_alone
from tests.support.layouts import case_name
from tests.support.sampling import marked_slow
from tests.support.training import (
    MODELS,
    context,
    layout_name,
    make_batch,
    run_in_layout,
    worst_gradient,
)

CPU = torch.device("cpu")


def trained(config, layout, packed, several=True):
    """The loss, the gradients as {name: [(box, piece)]}, and how many documents each call of the
    kernel had. several: documents, not one a row."""
    calls.clear()
    with pytest.MonkeyPatch.context() as patch:
        if packed:
            real = masks_of_chunks
            patch.setattr(batches, "_takes_boundaries", lambda ctx: True)
            patch.setattr(attend, "varlen_attention", each_alone)
            patch.setattr(attend, "HALF", (torch.float32,))
            always = lambda *args, packed, **how: real(*args, packed=True, **how)  # noqa: E731
            patch.setattr(model_masks, "masks_of_chunks", always)
        ctx = context(**layout)
        model = attentive(replace(config, max_positions=32), ctx)
        ids, targets = make_batch(0, sequence=15)
        given = documents() if several and ctx.pp_rank == 0 else None
        loss = model.train_batch(ids, targets=targets, document_ids=given, num_microbatches=2)
    pieces = {e.name: (e.parameter.grad, e.spec.pieces(ctx.place)) for e in model.entries()}
    gradients = {n: [(p.box, g[p.index()]) for p in parts] for n, (g, parts) in pieces.items()}
    return loss.item(), gradients, list(calls)


WHOLE = [(name, True) for name in ("gpt2", "llama", "mpt, learned positions")]


def trained_packed(cases, layout):
    return [trained(MODELS[name], layout, True, several) for name, several in cases]


def compared(ranks, cases, layout):
    """Of each case the number of documents, the ranks' results and one process's by a mask."""
    found = zip(*run_in_layout(ranks, trained_packed, layout, cases), strict=True)
    for (name, several), results in zip(cases, found, strict=True):
        loss, gradients, masked = trained(MODELS[name], {}, False, several)
        assert masked == []
        for ours, _, _ in results:
            assert abs(ours / loss - 1) < 1e-5, name
        yield several, results, gradients


@pytest.mark.parametrize(
    "layout",
    marked_slow(
        [{}, dict(tp=2, sp=True), dict(pp=2)], lambda number, _: number > 1, name=layout_name
    ),
)
def test_documents_alone_train_as_by_a_mask(ranks, layout):
    for _, results, gradients in compared(ranks, WHOLE, layout):
        for _, theirs, called in results:
            # 11 in the first four rows, 14 with a token of padding; empty ones beside the others' 7
            assert set(called) == {14 if layout.get("sp") else 11}
            for key, pieces in theirs.items() if not layout.get("tp") else ():
                for (_, ours), (_, whole) in zip(pieces, gradients[key], strict=True):
                    torch.testing.assert_close(ours, whole, atol=1e-6, rtol=1e-4)


CHUNKS = [
    ("llama", dict(cp=2)),
    ("gpt2", dict(cp=2, method="ulysses")),
    ("llama", dict(cp=2, pp=2)),
    ("mpt, learned positions", dict(cp=2, tp=2, sp=True)),
]


@pytest.mark.parametrize(
    ("name", "layout"), marked_slow(CHUNKS, lambda number, _: number > 1), ids=case_name
)
def test_packed_chunks_train_as_one_process_by_a_mask(ranks, name, layout):
    cases = [(name, False), (name, True)]
    for several, results, gradients in compared(ranks, cases, layout):
        # rows of 16 tokens, one of padding: 4 rows, or 11 documents and the padding of 3 rows
        documents_of_calls = {14 if several else len(LENGTHS) // 2}
        assert all(set(called) == documents_of_calls for _, _, called in results)
        worst = worst_gradient([each for _, each, _ in results], gradients)
        assert worst[0] < 1e-5, worst


def test_boundaries_are_where_the_number_changes():
    for padding in (0, 1):
        found = batches._boundaries(documents(), padding, 2).view(2, -1)
        for ids, row in zip(documents().chunk(2), found, strict=True):
            ids = F.pad(ids, (0, padding), value=-1)
            expected = [0]
            for place in range(1, ids.numel()):
                line, column = divmod(place, 15 + padding)
                if column == 0 or ids[line, column] != ids[line, column - 1]:
                    expected.append(place)
            expected += [ids.numel()] * (len(row) - len(expected))
            assert row.tolist() == expected


def test_a_number_of_several_runs_needs_the_mask():
    ids = documents()
    ids[0, 7] = 5
    assert batches._boundaries(ids, 0, 2) is None
    assert batches._boundaries(None, 0, 2) is None
    assert batches._boundaries(ids[:0], 0, 2) is None


def test_what_the_kernel_takes():
    for dtype, options, fits in (
        (torch.bfloat16, {}, True),
        (torch.float16, {}, True),
        (torch.float32, {}, False),
        (torch.bfloat16, {"dropout": 0.1}, False),
        (torch.bfloat16, {"head_size": 12}, False),
        (torch.bfloat16, {"head_size": 264}, False),
    ):
        layer = CausalSelfAttention(32, 4, **options)
        assert layer.takes_packed(dtype) is fits, (dtype, options)
        if "dropout" in options:
            assert layer.eval().takes_packed(dtype)


def test_one_layer_computes_and_differentiates_as_by_a_mask(monkeypatch):
    monkeypatch.setattr(attend, "varlen_attention", each_alone)
    layer, ids = CausalSelfAttention(32, 4, 2, scale=0.3), documents()
    x, results = torch.randn(8, 15, 32), []
    packed = Packed(batches._boundaries(ids, 0, 1), 15)
    for recompute in (False, True):
        layer.recompute = recompute
        for mask in (segment_mask(ids), packed):
            x = x.detach().requires_grad_()
            y = layer(x, mask=mask)
            y.sin().sum().backward()
            results.append((y.detach(), x.grad))
    for y, gradient in results[1:]:
        torch.testing.assert_close(y, results[0][0])
        torch.testing.assert_close(gradient, results[0][1])


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


@pytest.mark.parametrize("method", ["allgather", "ulysses"])
def test_a_chunk_attends_as_by_hand(method):
    for case in product([2, 3], range(4), [0, 2]):
        check_chunks(method, *case)


def check_chunks(method, cp, case, empty):
    """empty: documents at the end."""
    sequence = 6 * cp
    lengths = rows_of(case, sequence)
    ids = [[n for n, size in enumerate(row) for _ in range(size)] for row in lengths]
    flat = torch.tensor([0, *(size for row in lengths for size in row)]).cumsum(0)
    boundaries = torch.cat([flat, flat[-1:].expand(empty)]).int()
    layer = CausalSelfAttention(16, 4, 2, ctx=context())
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
                patch.setattr(attend, "varlen_attention", each_alone)
                found = layer.attend._here(q, k[:, :, : chunk.stop], v[:, :, : chunk.stop], mask)
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("method", ["allgather", "ulysses"])
def test_no_rows_need_no_documents(monkeypatch, method):
    """CUDA's kernel refuses none; a replica's batch may have no rows."""
    monkeypatch.setattr(attend, "varlen_attention", None)
    layer = CausalSelfAttention(16, 4, 2, ctx=context())
    cut = SequenceCut(8, 2, 1, method)
    masks = masks_of_chunks(cut, 0, torch.float32, CPU, packed=True).masks
    for chunk, mask in zip(cut.queries, masks, strict=True):
        q, k = torch.randn(0, 4, len(chunk), 4), torch.randn(0, 2, chunk.stop, 4)
        assert layer.attend._here(q, k, k, mask).shape == q.shape
