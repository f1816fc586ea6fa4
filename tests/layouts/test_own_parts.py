"""Parts that a user adds from outside of the package: a product in float8, and parameters that rest
as ranges over the replicas."""

from dataclasses import replace
from functools import cache

import pytest
import torch

import megazoo
from megazoo.layers import ColumnParallelLinear, RowParallelLinear
from megazoo.layers.experts import ColumnParallelExperts, RowParallelExperts
from megazoo.layers.product import PLAIN
from megazoo.models.mixtral import MixtralConfig
from megazoo.parallel.deferred import WeightQueue
from megazoo.parallel.layout import Layout
from tests.support.layouts import MODELS, sizes_of
from tests.support.own_float8 import Float8, multiply_in_float8
from tests.support.own_storage import rest_as_ranges, whole_parameters
from tests.support.training import TINY, context, make_batch, replica_rows, run_in_layout

LLAMA = replace(MODELS["llama"], layers=2, tie_embeddings=False)
MIXTRAL = MixtralConfig(
    **{**TINY, "layers": 2}, kv_heads=2, ffn_size=48, experts=4, experts_per_token=2
)


def integers(*shape, seed, largest):
    """Random integers up to 6. largest: whether one is 7, which gives a scale that changes none."""
    values = torch.randint(-6, 7, shape, generator=torch.Generator().manual_seed(seed)).float()
    if largest:
        values.view(-1)[seed] = 7
    return values


def results_of(make, product_of, layout, delayed):
    """The output of a layer of 16 inputs and 8 outputs, and the gradients of x and its weight."""
    ctx = context(**layout)
    layer, first = make(ctx), ctx.dp_rank == ctx.cp_rank == ctx.tp_rank == 0
    layer.product = product_of(ctx)
    layer.weight.data = integers(*layer.weight.shape, seed=1, largest=first)
    queue = layer.weight_queue = WeightQueue(lambda _: None) if delayed else None
    x = integers(12, layer.weight.shape[-1], seed=2, largest=first).requires_grad_()
    experts = (
        [torch.tensor([12, *[0] * (len(layer.weight) - 1)])] if layer.weight.dim() == 3 else []
    )
    y = layer(x, *experts)
    y.backward(integers(*y.shape, seed=3, largest=first))
    if queue:
        queue.take()()
    return [y.detach(), x.grad, layer.weight.grad]


LAYERS = {
    "column": lambda ctx: ColumnParallelLinear(16, 8, bias=False, ctx=ctx),
    "row": lambda ctx: RowParallelLinear(16, 8, bias=False, ctx=ctx),
    "column of experts": lambda ctx: ColumnParallelExperts(4, 16, 8, ctx=ctx),
    "row of experts": lambda ctx: RowParallelExperts(4, 16, 8, ctx=ctx),
}


def differences(layout, delayed):
    found = []
    for make in LAYERS.values():
        both = [
            results_of(make, product_of, layout, delayed)
            for product_of in (Float8, lambda _: PLAIN)
        ]
        found += [(a - b).abs().max().item() for a, b in zip(*both, strict=True)]
    return found


@pytest.mark.parametrize("layout", ["tp2", "tp2+sp", "cp2", "dp2ep2"])
@pytest.mark.parametrize("delayed", [False, True])
def test_float8_changes_no_product_of_values_that_it_has(ranks, layout, delayed):
    layout = Layout.named(layout)
    found = ranks(differences, layout.ranks, sizes_of(layout), delayed)
    assert max(map(max, found)) < 1e-6


def losses(config, count, float8, unreduced, schedule, layout):
    """Train three steps, with adapters on the model's layers. count: micro-batches."""
    ctx = context(**layout)
    model = megazoo.from_config(config, ctx, seed=3)
    if float8:
        multiply_in_float8(model, unreduced)
    megazoo.lora.add(model, rank=4)
    optimizer, found = megazoo.optim.AdamW(model, lr=1e-2), []
    for step in range(3):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        how = {"num_microbatches": count, "schedule": schedule}
        found.append(model.train_batch(ids, targets=targets, **how).item())
        optimizer.step()
    return found


def distance(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@cache
def in_one_process(config, count, float8=True):
    return losses(config, count, float8, (), "1f1b", {})


@pytest.mark.parametrize("layout", ["tp2", "pp2+zb-h1", "tp2+sp", "cp2", "dp2ep2"])
def test_the_losses_in_float8_are_those_of_one_process(ranks, layout):
    """They differ by at most a tenth of what float8 changes, and by more if the largest value of
    one kind of factor is not reduced."""
    layout = Layout.named(layout)
    config, count = (LLAMA, 2) if layout.ep == 1 else (MIXTRAL, 1)
    expected = in_one_process(config, count)
    limit = distance(expected, in_one_process(config, count, float8=False)) / 10

    def of(unreduced=()):
        how = (config, count, True, unreduced, layout.schedule)
        return distance(run_in_layout(ranks, losses, sizes_of(layout), *how)[0], expected)

    assert of() <= limit
    shared = () if layout.pp > 1 else ("x",) if layout.cp > 1 else ("x", "weight")
    for what in shared:
        assert of({what}) > limit, what


def trained_as_ranges(ranges, layout):
    """Train two steps of one micro-batch; return the losses and the weights."""
    ctx = context(**layout, folded={"ranges": layout["dp"]} if ranges else None)
    model = megazoo.from_config(LLAMA, ctx, seed=3)
    model = rest_as_ranges(model) if ranges else model
    optimizer, found = megazoo.optim.AdamW(model, lr=1e-2, weight_decay=0.0, clip_grad=0.0), []
    for step in range(2):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        found.append(model.train_batch(ids, targets=targets).item())
        optimizer.step()
    resting = sum(parameter.numel() for parameter in model.parameters())
    weights = whole_parameters(model)
    return found, weights, resting


def test_parameters_that_rest_as_ranges_train_bit_for_bit_as_whole_ones(ranks):
    plain = ranks(trained_as_ranges, 2, False, {"dp": 2})
    of_ranges = ranks(trained_as_ranges, 2, True, {"dp": 2})
    for (losses, weights, whole), (found, gathered, resting) in zip(plain, of_ranges, strict=True):
        assert found == losses
        assert resting <= whole / 2 + len(weights)
        for name, weight in weights.items():
            assert torch.equal(gathered[name], weight), name
