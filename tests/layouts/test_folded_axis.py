"""An axis of a user's own, folded into dp x cp: what is cut over it trains as in one process."""

import math
from dataclasses import replace

import pytest
import torch

import megazoo
from megazoo.errors import UserError
from megazoo.models.registry import FAMILIES
from megazoo.optim import AdamW, Muon
from megazoo.parallel import ParallelContext, ParameterSpec, Shard
from megazoo.parallel.buckets import GradientBuckets
from tests.support.layouts import parts_of, parts_of_gradients
from tests.support.training import (
    context,
    make_batch,
    randomize,
    replica_rows,
    worst_gradient,
    worst_relative,
)

LAYOUTS = {
    "dp2, toy2": dict(dp=2, folded={"toy": 2}),
    "tp2dp2, toy2": dict(tp=2, dp=2, folded={"toy": 2}),
    "cp2, toy2": dict(cp=2, folded={"toy": 2}),
    "dp4, toy2": dict(dp=4, folded={"toy": 2}),
}
CLIP = 0.05  # below every norm


@pytest.fixture(scope="module", autouse=True)
def family():
    """The family is known as "toy" for these tests only."""
    from tests.support import own_axis

    FAMILIES["toy"] = own_axis.Toy
    yield
    del FAMILIES["toy"]


def config(**changes):
    return replace(FAMILIES["toy"].presets["toy-tiny"], **changes)


def trained(config, layout, zero=0, steps=3, own_backward=False):
    """Losses and norms; the last gradients (none under ZeRO-1) and the weights, by box."""
    ctx = context(**layout)
    model = randomize(megazoo.from_config(config, ctx, seed=3))
    entries = model.trained_entries()
    axes = {entry.parameter: entry.spec.replicas(ctx) for entry in entries}
    late = [entry.parameter for entry in entries if entry.name in model.used_again]
    model.engine._buckets = GradientBuckets(list(axes), ctx, 3000, late, axes=axes)  # many of them
    optimizer, history = AdamW(model, lr=1e-2, eps=1e-3, clip_grad=CLIP, zero=zero), []
    for step in range(steps):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        if own_backward:  # of rows with as many labels in each
            model.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            model.sync_gradients()
        else:
            loss = model.train_batch(ids, targets=targets, num_microbatches=len(ids) // 2)
        history.append((loss.item(), optimizer.step().item()))
    gradients = {} if zero else parts_of_gradients(model)
    return history, gradients, parts_of(model, lambda parameter: parameter.detach())


def in_world(ranks, function, layout, *args, **kwargs):
    sizes = math.prod(size for size in layout.values() if isinstance(size, int))
    return ranks(function, sizes, *args, layout, **kwargs)


@pytest.fixture(scope="module")
def one_process(family):
    return trained(config(), {})


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda name: name.replace(", ", "+"))
@pytest.mark.parametrize("zero", [0, 1])
def test_it_trains_as_in_one_process(ranks, one_process, layout, zero):
    history, gradients, weights = one_process
    assert min(norm for _, norm in history) > CLIP
    results = in_world(ranks, trained, LAYOUTS[layout], config(), zero=zero)
    for ours, _, _ in results:
        assert worst_relative(ours, history) < 1e-5
    expected = [weights] if zero else [gradients, weights]
    for number, whole in enumerate(expected, start=3 - len(expected)):
        worst, name = worst_gradient([each[number] for each in results], whole)
        assert worst < 1e-5, name


def test_a_backward_of_ones_own_is_averaged(ranks):
    expected, gradients, _ = trained(config(), {}, own_backward=True)
    results = in_world(ranks, trained, LAYOUTS["dp4, toy2"], config(), own_backward=True)
    worst, name = worst_gradient([each[1] for each in results], gradients)
    assert worst < 1e-5, name
    assert (
        worst_relative([norm for _, norm in results[0][0]], [norm for _, norm in expected]) < 1e-5
    )


def test_buckets_of_several_axes_leave_in_the_order_of_their_last_parameters():
    ctx = ParallelContext.virtual(dp=4, folded={"toy": 2})
    parameters = [torch.nn.Parameter(torch.zeros(10)) for _ in range(8)]
    replicas = ctx.axis("toy").replicas
    buckets = GradientBuckets(parameters, ctx, 20, axes=dict.fromkeys(parameters[::4], replicas))
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    order = [[numbers[id(parameter)] for parameter, _ in each] for each in buckets.members]
    assert order == [[7, 6], [5, 3], [2, 1], [4, 0]]
    assert [axis.size for axis in buckets.axes] == [4, 4, 4, 2]
    assert buckets.range_of(parameters[0], 1) == (0, 10)  # [4, 0]: 2 x 64 elements, of two ranks


def test_what_can_not_be_cut_or_trained_is_refused():
    for matrices, size in ((5, 2), (2, 4)):
        ctx = ParallelContext.virtual(dp=4, folded={"toy": size})
        with pytest.raises(UserError, match=f"cut evenly over toy {size}"):
            FAMILIES["toy"].on_meta(config(matrices=matrices), ctx)
    ctx = ParallelContext.virtual(dp=2, folded={"toy": 2})
    model = FAMILIES["toy"].on_meta(config(), ctx)
    shards = (Shard(0, (4,), axis="toy"),)
    layer = model.layers["0"].stack
    layer.multiplied = ("matrix",)
    layer.add_parameter("matrix", ParameterSpec((4, 3), shards))
    with pytest.raises(UserError, match=r"can't train layers.0.stack.matrix: .* cut over toy"):
        Muon(model)
