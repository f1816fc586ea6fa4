"""Layers against plain torch, in one process and cut over ranks."""

import runpy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megazoo.errors import UserError
from megazoo.layers import (
    MLP,
    CausalSelfAttention,
    ColumnParallelLinear,
    GatedMLP,
    HeadwiseLayerNorm,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    rotate,
    vocab_parallel_cross_entropy,
)
from megazoo.parallel import ParallelContext, Shard, collectives
from megazoo.parallel.shard import units_for
from tests.support.layers import drawn_by_name, gradients_of
from tests.support.layouts import assembled
from tests.support.training import context, layout_name, run_in_layout


def run_layer(make, x, tp, take=None):
    """Build a layer from a seed, run it forward and backward; returns y, the gradient of x and
    global gradients."""
    ctx = context(tp=tp)
    torch.manual_seed(0)
    with ctx:
        layer = drawn_by_name(LAYERS[make](), lambda spec: spec.std or 0.1)
    x = x.clone().requires_grad_(x.is_floating_point())
    y = layer(x) if take is None else take(layer, x)
    (y.sin() * torch.arange(1.0, y.numel() + 1).view_as(y).cos()).sum().backward()
    return y.detach(), x.grad, gradients_of(layer, ctx)


LAYERS = {
    "column, gathered": lambda: ColumnParallelLinear(12, 20, gather_output=True),
    "row, from whole input": lambda: RowParallelLinear(12, 20, input_is_parallel=False),
    "mlp": lambda: MLP(12, 20),
    "gated mlp": lambda: GatedMLP(12, 20, bias=True),
    "uneven column, gathered": lambda: ColumnParallelLinear(20, 22, gather_output=True),
    "uneven row, from whole input": lambda: RowParallelLinear(22, 20, input_is_parallel=False),
    "uneven mlp": lambda: MLP(20, 23),
    "uneven mlp, aligned": lambda: MLP(20, 1283),
    "uneven gated mlp": lambda: GatedMLP(20, 23, bias=True),
    "uneven gated mlp, aligned": lambda: GatedMLP(20, 1283, bias=True),
    "attention": lambda: CausalSelfAttention(12, 4),
    "attention, uneven heads": lambda: CausalSelfAttention(20, 5),
    "embedding": lambda: VocabParallelEmbedding(13, 6),
}


def run_layers(inputs, tp):
    return [run_layer(name, x, tp) for name, x in inputs.items()]


@pytest.mark.parametrize("tp", [2, 4])
def test_layers_cut_over_ranks_equal_the_whole(ranks, tp):
    torch.manual_seed(1)
    inputs = {}
    for name in LAYERS:
        width = 22 if name == "uneven row, from whole input" else 20 if "uneven" in name else 12
        inputs[name] = (
            torch.randint(0, 13, (2, 7)) if name == "embedding" else torch.randn(2, 7, width)
        )
    found = zip(*ranks(run_layers, tp, inputs, tp), strict=True)
    for (name, x), results in zip(inputs.items(), found, strict=True):
        close = partial(
            torch.testing.assert_close,
            atol=1e-5,
            rtol=1e-5,
            msg=lambda why, name=name: f"{name}: {why}",
        )
        y, x_grad, gradients = run_layer(name, x, 1)
        whole = assembled([gradients])
        for rank_y, rank_x_grad, _ in results:
            close(rank_y, y)
            if x_grad is not None:
                close(rank_x_grad, x_grad)
        for key, gradient in assembled([gradients for _, _, gradients in results]).items():
            close(gradient, whole[key])


def test_one_process_layers_equal_torch():
    x = torch.randn(3, 12)
    column, row = ColumnParallelLinear(12, 20), RowParallelLinear(12, 20)
    assert torch.equal(column(x), F.linear(x, column.weight, column.bias))
    torch.testing.assert_close(row(x), F.linear(x, row.weight, row.bias))
    gated = GatedMLP(12, 20)
    gate, up = gated.gate_up.weight.split(20)
    torch.testing.assert_close(
        gated(x), F.linear(F.silu(x @ gate.T) * (x @ up.T), gated.down.weight)
    )
    q, k, v = QKVParallelLinear(12, 4, kv_heads=2)(x[None])
    assert (q.shape, k.shape, v.shape) == ((1, 4, 3, 3), (1, 2, 3, 3), (1, 2, 3, 3))


def cuts(shard, tp, rank):
    return [tuple(cut) for cut in shard.cuts(tp, rank)]


def test_fused_parts_are_cut_part_by_part():
    # q, k and v of four heads of two features, over two ranks: rank 1 holds the second half of
    # each.
    fused = Shard(0, (8, 8, 8), (2, 2, 2))
    assert cuts(fused, 2, 1) == [(4, 0, 4, True), (12, 4, 4, True), (20, 8, 4, True)]
    # Grouped queries: four query heads, two key and value heads; a KV head's two queries stay with
    # it.
    grouped = Shard(0, (8, 4, 4), (4, 2, 2))
    assert cuts(grouped, 2, 1) == [(4, 0, 4, True), (10, 4, 2, True), (14, 6, 2, True)]
    # Over four ranks each KV head is held by two, and the first of them owns it.
    replicated = Shard(0, (8, 4, 4), (2, 2, 2))
    assert cuts(replicated, 4, 2) == [(4, 0, 2, True), (10, 2, 2, True), (14, 4, 2, True)]
    assert cuts(replicated, 4, 3) == [(6, 0, 2, True), (10, 2, 2, False), (14, 4, 2, False)]
    # Five units over two ranks: the first has one more.
    five = Shard(0, (10,), (2,))
    assert [cuts(five, 2, rank) for rank in range(2)] == [[(0, 0, 6, True)], [(6, 0, 4, True)]]


def lengths_of(size, units, tp):
    return [Shard(0, (size,), units).local_sizes(tp, rank)[0] for rank in range(tp)]


def test_features_are_cut_evenly_or_else_by_128_or_else_nearly_so():
    assert units_for((12,), 4) == units_for((11008, 11008), 4) == ()  # as ever where tp divides
    assert lengths_of(50, units_for((50,), 4), 4) == [13, 13, 12, 12]
    assert units_for((1283, 1283), 4) == (128, 128)
    assert lengths_of(1283, (128,), 4) == [384, 384, 259, 256]
    assert lengths_of(1283, (128,), 2) == [643, 640]
    assert units_for((512,), 3) == ()  # 256, 128 and 128 would be too uneven
    for size in [*range(1, 300), 1064, 1283, 11008, 13824]:
        for tp in range(1, min(size, 16) + 1):
            shard, end = Shard(0, (size,), units_for((size,), tp)), 0
            for rank in range(tp):
                (cut,) = shard.cuts(tp, rank)
                assert (cut.global_start, cut.local_start, cut.owned) == (end, 0, True)
                end += cut.length
            lengths = lengths_of(size, units_for((size,), tp), tp)
            assert end == size
            assert lengths[0] == max(lengths)  # of which the planner takes advantage
            assert min(lengths) > 0
            assert lengths[0] - lengths[-1] <= 1 or lengths[0] <= 1.25 * size / tp


def cross_entropies(cases, tp):
    return [cross_entropy(*case, tp) for case in cases]


def cross_entropy(logits, targets, tp):
    ctx = context(tp=tp)
    parts = Shard(1, (logits.shape[1],)).cuts(tp, ctx.tp_rank)
    start, length = parts[0].global_start, parts[0].length
    mine = logits[:, start : start + length].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(mine, targets, start, ctx=ctx)
    (losses * torch.arange(1.0, len(losses) + 1)).sum().backward()
    return losses.detach(), mine.grad


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_cross_entropy_equals_torch(ranks, tp):
    torch.manual_seed(2)
    targets = torch.randint(0, 37, (50,)).masked_fill(torch.rand(50) < 0.3, -100)
    tolerances = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
    cases = [((torch.randn(50, 37) * 20).to(dtype), targets) for dtype in tolerances]
    found = zip(*ranks(cross_entropies, tp, cases, tp), strict=True)
    for (logits, _), results in zip(cases, found, strict=True):
        whole = logits.float().clone().requires_grad_()
        expected = F.cross_entropy(whole, targets, reduction="none")
        (expected * torch.arange(1.0, 51)).sum().backward()
        for losses, _ in results:
            torch.testing.assert_close(losses, expected, atol=1e-4, rtol=1e-5)
        gradient = torch.cat([gradient for _, gradient in results], dim=1)
        assert gradient.dtype == logits.dtype
        bounds = dict.fromkeys(("atol", "rtol"), tolerances[logits.dtype])
        torch.testing.assert_close(gradient.float(), whole.grad, **bounds)


def head_losses(cases, layout):
    return [head_loss(*case, layout) for case in cases]


def head_loss(x, weight, targets, rows, factor, layout):
    """Loss, and gradients of it times 3: of this rank's part of x's tokens, and of its rows of the
    weight."""
    ctx = context(**layout)
    head = VocabParallelHead(len(weight), weight.shape[1], ctx=ctx).to(x.dtype)
    with torch.no_grad():
        head.weight.copy_(weight[head.start : head.start + head.rows])
    x = x.chunk(ctx.tp_size, dim=1)[ctx.tp_rank] if ctx.sequence_parallel else x
    x = x.clone().requires_grad_()
    with mock.patch.object(VocabParallelHead, "tokens_at_once", rows):
        loss = head.loss_in_pieces(x, targets, factor)
    if factor is not None:
        (3 * loss).backward()
    return loss.detach(), x.grad, head.weight.grad


@pytest.mark.parametrize(
    "layout", [dict(), dict(tp=2), dict(tp=4), dict(tp=2, sp=True)], ids=layout_name
)
def test_the_loss_of_a_head_in_pieces_equals_torch(ranks, layout):
    torch.manual_seed(4)
    for dtype, rows in ((torch.float32, 7), (torch.float32, 99), (torch.bfloat16, 13)):
        check_head_loss(ranks, layout, dtype, rows)


def check_head_loss(ranks, layout, dtype, rows):
    x, weight = torch.randn(3, 16, 8).to(dtype), (3 * torch.randn(37, 8)).to(dtype)
    targets = torch.randint(0, 37, (3, 16)).masked_fill(torch.rand(3, 16) < 0.3, -100)
    whole, matrix = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = (whole @ matrix.t()).float()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    (3 * expected).backward()
    exact = dtype == torch.float32

    def assert_close(ours, theirs):
        assert (ours - theirs).abs().max() <= (1e-6 if exact else 1e-2) * theirs.abs().max()

    factors = (3.0, 0.7)  # what the gradient will be, and another
    cases = [(x, weight, targets, rows, torch.tensor(factor)) for factor in factors]
    for results in zip(*run_in_layout(ranks, head_losses, layout, cases), strict=True):
        losses, x_grads, weight_grads = zip(*results, strict=True)
        assert_close(torch.stack(losses), expected.detach())
        if layout.get("sp"):
            x_grads = [torch.cat(x_grads, dim=1)]
        for x_grad in x_grads:
            assert_close(x_grad, whole.grad)
        assert_close(torch.cat(weight_grads), matrix.grad)
    with torch.no_grad():
        loss, *gradients = head_loss(x, weight, targets, rows, None, {})
    assert gradients == [None, None]
    assert_close(loss, expected.detach())


def test_a_gated_mlp_leaves_what_its_activation_returns_of_its_input_alone():
    torch.manual_seed(5)
    for activation in (lambda x: x, lambda x: x.view_as(x), torch.tanh):  # same, a view, new
        mlp, x = GatedMLP(8, 12, activation), torch.randn(3, 8, requires_grad=True)
        layers = mlp.gate_up, mlp.down
        weights = [torch.randn_like(layer.weight).requires_grad_() for layer in layers]
        gate, up = (x @ weights[0].t()).chunk(2, dim=-1)
        y = (activation(gate) * up) @ weights[1].t()
        expected = torch.autograd.grad(y.sin().sum(), [x, *weights])
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight = torch.nn.Parameter(weight.detach())
        ours = torch.autograd.grad(mlp(x).sin().sum(), [x, *(layer.weight for layer in layers)])
        for gradient, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(gradient, theirs)


def test_cross_entropy_survives_large_logits():
    logits = torch.tensor([[1e4, 0.0], [-1e4, 0.0]])
    losses, gradient = cross_entropy(logits, torch.tensor([0, 1]), 1)
    assert losses.tolist() == [0, 0]
    assert gradient.isfinite().all()


def test_what_cannot_be_cut_is_refused():
    with ParallelContext.virtual(tp=4):
        for make, message in (
            (
                lambda: ColumnParallelLinear(8, (10, 3)),
                "3 outputs can't be split over tp 4: use tp of at most 3",
            ),
            (
                lambda: RowParallelLinear(3, 8),
                "3 inputs can't be split over tp 4: use tp of at most 3",
            ),
            # two ranks would add the same to the sum
            (
                lambda: RowParallelLinear(8, 8, unit=4),
                "8 inputs in units of 4 can't be split over tp 4: use tp of at most 2",
            ),
            # two units and a rest, three units
            (
                lambda: ColumnParallelLinear(8, 10, units=(4,)),
                "10 outputs in units of 4 can't be split over tp 4, nor replicated",
            ),
            (
                lambda: ColumnParallelLinear(8, 12, units=(4,)),
                "12 outputs in units of 4 can't be split over tp 4, nor replicated",
            ),
            (
                lambda: QKVParallelLinear(8, 2),
                "2 heads with 2 key-value heads can't be split over tp 4",
            ),
            (lambda: VocabParallelHead(3, 8), "a vocabulary of 3 tokens can't be split over tp 4"),
            (
                lambda: HeadwiseLayerNorm(18, 6),
                "18 features in units of 6 can't be split over tp 4, nor replicated",
            ),
        ):
            with pytest.raises(UserError) as refused:
                make()
            assert message in str(refused.value)
    with pytest.raises(UserError, match="a hidden size of 8 is not a multiple of 3 heads"):
        QKVParallelLinear(8, 3)


def test_layers_built_alone_are_initialised_from_torchs_seed():
    torch.manual_seed(4)
    first = ColumnParallelLinear(64, 64)
    torch.manual_seed(4)
    second = ColumnParallelLinear(64, 64)
    assert torch.equal(first.weight, second.weight)
    assert abs(first.weight.std() - 0.02) < 1e-3
    assert not torch.equal(first.weight, ColumnParallelLinear(64, 64).weight)


@pytest.mark.parametrize(
    "batch", [(), (2,)], ids=["positions of all rows", "positions of each row"]
)
def test_rotation_turns_pairs_and_its_gradient_turns_back(batch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(*batch, 5, 4, generator=generator, dtype=torch.float64)
    cos, sin = (torch.cat([part, part], dim=-1) for part in (angles.cos(), angles.sin()))
    turns = torch.polar(torch.ones_like(angles), angles).unsqueeze(-3)
    pairs = torch.complex(*x.chunk(2, dim=-1)) * turns
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat([pairs.real, pairs.imag], dim=-1))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), x)


def test_a_torch_without_the_old_names_of_collectives_will_do(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_gather_single", "new gather", raising=False)
    monkeypatch.setattr(torch.distributed, "reduce_scatter_single", "new scatter", raising=False)
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        monkeypatch.delattr(torch.distributed, name)
    fresh = runpy.run_path(collectives.__file__)
    assert (fresh["_all_gather"], fresh["_reduce_scatter"]) == ("new gather", "new scatter")
