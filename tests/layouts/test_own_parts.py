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
from tests.support.own_storage import gathered_parameters, rest_as_ranges
from tests.support.training import (
    TINY,
    context,
    make_batch,
    replica_rows,
    run_in_layout,
    tiny_config,
)

LLAMA = replace(MODELS["llama"], layers=2, tie_embeddings=False)
MIXTRAL = MixtralConfig(
    **{**TINY, "layers": 2}, kv_heads=2, ffn_size=48, experts=4, experts_per_token=2
)


def integers(*shape, seed, largest):
    """Random integers up to 6. largest: one of them, if it is above 6. With 7 the scale is a power
    of two, so that float8 changes none; with 11 it changes most."""
    values = torch.randint(-6, 7, shape, generator=torch.Generator().manual_seed(seed)).float()
    if largest:
        values.view(-1)[seed] = largest
    return values


def results_of(make, product_of, layout, delayed, largest):
    """The output of a layer of 16 inputs and 8 outputs, and the gradients of x and its weight."""
    ctx = context(**layout)
    layer, first = make(ctx), largest * (ctx.dp_rank == ctx.cp_rank == ctx.tp_rank == 0)
    layer.product = product_of(ctx)
    layer.weight.data = integers(*layer.weight.shape, seed=1, largest=first)
    queue = layer.weight_queue = WeightQueue(lambda _: None) if delayed else None
    x = integers(12, layer.weight.shape[-1], seed=2, largest=first).requires_grad_()
    counts = torch.tensor([5, 7, *[0] * (len(layer.weight) - 2)])  # rows of each expert
    y = layer(x, counts) if layer.weight.dim() == 3 else layer(x)
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


def differences(layout, delayed, largest):
    found = []
    for make in LAYERS.values():
        rounded = results_of(make, Float8, layout, delayed, largest)
        plain = results_of(make, lambda _: PLAIN, layout, delayed, largest)
        found += [(a - b).abs().max().item() for a, b in zip(rounded, plain, strict=True)]
    return found


@pytest.mark.parametrize("layout", ["tp2", "tp2+sp", "cp2", "dp2ep2"])
@pytest.mark.parametrize("delayed", [False, True])
def test_float8_changes_no_product_of_values_that_it_has(ranks, layout, delayed):
    layout = Layout.named(layout)
    found = ranks(differences, layout.ranks, sizes_of(layout), delayed, 7)
    assert max(map(max, found)) < 1e-6
    found = ranks(differences, layout.ranks, sizes_of(layout), delayed, 11)
    assert min(map(min, found)) > 1e-3, "every product is computed in float8"


def losses(config, count, float8, adapted, unreduced, schedule, layout):
    """Train three steps. count: micro-batches. adapted: whether with adapters on the layers."""
    ctx = context(**layout)
    model = megazoo.from_config(config, ctx, seed=3)
    if float8:
        multiply_in_float8(model, unreduced)
    if adapted:
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
def in_one_process(config, count, adapted, float8=True):
    return losses(config, count, float8, adapted, (), "1f1b", {})


@pytest.mark.parametrize("layout", ["tp2", "pp2+zb-h1", "tp2+sp", "cp2", "dp2ep2"])
@pytest.mark.parametrize("adapted", [False, True])
def test_the_losses_in_float8_are_those_of_one_process(ranks, layout, adapted):
    """They differ by at most a tenth of what float8 changes, and by more if the largest value of
    one kind of factor is not reduced."""
    layout = Layout.named(layout)
    config, count = (LLAMA, 2) if layout.ep == 1 else (MIXTRAL, 1)
    expected = in_one_process(config, count, adapted)
    changed = distance(expected[:2], in_one_process(config, count, adapted, float8=False)[:2])

    def losses_of(unreduced=()):
        how = (config, count, True, adapted, unreduced, layout.schedule)
        return run_in_layout(ranks, losses, sizes_of(layout), *how)[0]

    # two steps: in the third, one factor that is rounded to the other neighbour shows
    assert distance(losses_of()[:2], expected[:2]) <= changed / 10
    shared = () if layout.pp > 1 else ("x", "grad") if layout.cp > 1 else ("x", "weight", "grad")
    for what in shared:
        assert distance(losses_of({what}), expected) > changed / 10, what


def trained_as_ranges(config, ranges, layout):
    """Train two steps of one micro-batch; return the losses and the weights."""
    ctx = context(**layout, folded={"ranges": layout["dp"]} if ranges else None)
    model = megazoo.from_config(config, ctx, seed=3)
    model = rest_as_ranges(model) if ranges else model
    optimizer, found = megazoo.optim.AdamW(model, lr=1e-2, weight_decay=0.0, clip_grad=0.0), []
    for step in range(2):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        found.append(model.train_batch(ids, targets=targets).item())
        optimizer.step()
    resting = sum(parameter.numel() for parameter in model.parameters())
    weights = gathered_parameters(model)
    return found, weights, resting


@pytest.mark.parametrize("config", [LLAMA, tiny_config(tied=False)], ids=["llama", "gpt2"])
def test_parameters_that_rest_as_ranges_train_bit_for_bit_as_whole_ones(ranks, config):
    plain = ranks(trained_as_ranges, 2, config, False, {"dp": 2})
    of_ranges = ranks(trained_as_ranges, 2, config, True, {"dp": 2})
    for (losses, weights, whole), (found, gathered, resting) in zip(plain, of_ranges, strict=True):
        assert found == losses
        assert resting <= whole / 2 + len(weights)
        for name, weight in weights.items():
            assert torch.equal(gathered[name], weight), name
