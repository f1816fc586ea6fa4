"""Packed documents by a kernel that takes each alone: their boundaries, and the same results as by
a mask. The kernel is CUDA's; in its place stands a loop over the documents."""

import pytest
import torch
import torch.nn.functional as F

from megazoo.engine import batch as batches
from megazoo.layers import CausalSelfAttention, Packed, attention, segment_mask
from tests.support.attention import attentive, calls, documents, each_alone
from tests.support.training import MODELS, context, layout_name, make_batch, run_in_layout


def trained(config, layout, packed):
    """The loss and the gradients, and how many documents each call of the kernel had."""
    calls.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "_takes_boundaries", lambda ctx: packed)
        patch.setattr(attention, "varlen_attention", each_alone)
        patch.setattr(attention, "HALF", (torch.float32,))
        ctx = context(**layout)
        model = attentive(config, ctx)
        ids, targets = make_batch(0, sequence=15)
        given = documents() if ctx.pp_rank == 0 else None
        loss = model.train_batch(ids, targets=targets, document_ids=given, num_microbatches=2)
    return loss.item(), {e.name: e.parameter.grad for e in model.entries()}, list(calls)


@pytest.mark.parametrize("layout", [{}, dict(pp=2), dict(tp=2, sp=True)], ids=layout_name)
@pytest.mark.parametrize("name", ["gpt2", "llama", "mpt, learned positions"])
def test_documents_alone_train_as_by_a_mask(ranks, name, layout):
    loss, gradients, masked = trained(MODELS[name], {}, False)
    assert masked == []
    for ours, theirs, called in run_in_layout(ranks, in_layout, layout, MODELS[name]):
        assert abs(ours / loss - 1) < 1e-6
        # 11 in the first four rows, 14 with a token of padding; empty ones beside the others' 7
        assert set(called) == {14 if layout.get("sp") else 11}
        if not layout.get("tp"):
            for key, gradient in theirs.items():
                torch.testing.assert_close(gradient, gradients[key], atol=1e-6, rtol=1e-4)


def in_layout(config, layout):
    return trained(config, layout, True)


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


@pytest.mark.parametrize(
    ("dtype", "options", "fits"),
    [
        (torch.bfloat16, {}, True),
        (torch.float16, {}, True),
        (torch.float32, {}, False),
        (torch.bfloat16, {"dropout": 0.1}, False),
        (torch.bfloat16, {"head_size": 12}, False),
        (torch.bfloat16, {"head_size": 264}, False),
    ],
)
def test_what_the_kernel_takes(dtype, options, fits):
    layer = CausalSelfAttention(32, 4, **options)
    assert layer.takes_packed(dtype) is fits
    if "dropout" in options:
        assert layer.eval().takes_packed(dtype)


def test_one_layer_computes_and_differentiates_as_by_a_mask(monkeypatch):
    monkeypatch.setattr(attention, "varlen_attention", each_alone)
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
