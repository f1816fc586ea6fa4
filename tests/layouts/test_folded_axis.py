"""An axis of a user's own, folded into dp x cp: what is cut over it trains as in one process."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

import megazoo
from megazoo.checkpoint import Checkpoint, load, save
from megazoo.checkpoint.ownership import foreign_entry, remove
from megazoo.errors import UserError
from megazoo.families.registry import FAMILIES
from megazoo.formats.resharding import write_shards
from megazoo.formats.source import SavedModel
from megazoo.lora.checksum import checksum_of
from megazoo.optim import AdamW, Muon
from megazoo.parallel import ParallelContext, ParameterSpec, Shard
from megazoo.parallel.buckets import GradientBuckets
from tests.support.layouts import parts_of, parts_of_gradients
from tests.support.planning import plan
from tests.support.sampling import marked_slow
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


def trained(config, layout, zero=0, steps=3, own_backward=False, saved=None):
    """Losses and norms; the last gradients (none under ZeRO-1) and the weights, by box."""
    ctx = context(**layout)
    model = randomize(megazoo.from_config(config, ctx, seed=3))
    entries = model.trained_entries()
    axes = {entry.parameter: entry.spec.replicas(ctx) for entry in entries}
    late = [entry.parameter for entry in entries if entry.name in model.used_again]
    model.engine.gradients.made = GradientBuckets(
        list(axes), ctx, 3000, late, axes=axes
    )  # many of them
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
    if saved:
        save(saved, steps, model, optimizer)
    gradients = {} if zero else parts_of_gradients(model)
    return history, gradients, parts_of(model, lambda parameter: parameter.detach())


def in_world(ranks, function, layout, *args, **kwargs):
    sizes = math.prod(size for size in layout.values() if isinstance(size, int))
    if sizes == 1:
        return [function(*args, layout, **kwargs)]
    return ranks(function, sizes, *args, layout, **kwargs)


@pytest.fixture(scope="module")
def one_process(family):
    return trained(config(), {})


@pytest.mark.parametrize(
    ("zero", "layout"),
    marked_slow(
        list(product([0, 1], LAYOUTS)),
        lambda _, case: (case[0] == 0) != (case[1] in ("tp2dp2, toy2", "cp2, toy2")),
        name=lambda case: f"{case[0]}-{case[1].replace(', ', '+')}",
    ),
)
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


def gone_on(config, source, saved, layout, zero=0):
    """Load a step, train one more and save that: its loss and norm."""
    ctx = context(**layout)
    model = megazoo.from_config(config, ctx, seed=4)
    optimizer = AdamW(model, lr=1e-2, eps=1e-3, clip_grad=CLIP, zero=zero)
    step = load(Checkpoint(source), model, optimizer)["step"]
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
    loss = model.train_batch(ids, targets=targets, num_microbatches=len(ids) // 2)
    norm = optimizer.step()
    if saved:
        save(saved, step + 1, model, optimizer)
    return loss.item(), norm.item()


def manifest_of(directory):
    return Checkpoint(directory).manifest


@pytest.mark.parametrize(
    ("layout", "zero"),
    marked_slow([("tp2dp2, toy2", 0), ("dp4, toy2", 1)], lambda number, _: number == 0),
)
def test_it_is_saved_and_goes_on_in_another_layout(ranks, tmp_path, layout, zero):
    trained(config(), {}, steps=2, saved=tmp_path / "one")
    assert manifest_of(tmp_path / "one")["format"] == 1
    in_world(ranks, trained, LAYOUTS[layout], config(), zero=zero, steps=2, saved=tmp_path / "many")
    saved = manifest_of(tmp_path / "many")
    assert (saved["format"], saved["layout"]["folded"]) == (2, {"toy": 2})
    assert {"model_tp_0_pp_0.safetensors", "model_tp_0_toy_1_pp_0.safetensors"} <= set(
        saved["files"]
    )
    assert_same_tensors(tmp_path / "many", tmp_path / "one")
    expected = gone_on(config(), tmp_path / "one", tmp_path / "on", {})
    goals = [({}, 0), (dict(tp=2), 0), (dict(dp=2), 1), (dict(dp=4, folded={"toy": 4}), 1)]
    for number, (goal, shares) in enumerate(goals):
        source, target = tmp_path / "many", tmp_path / f"on{number}"
        results = in_world(ranks, gone_on, goal, config(), source, target, zero=shares)
        assert worst_relative(results, [expected] * len(results)) < 1e-5, goal
        assert_same_tensors(target, tmp_path / "on")
        assert manifest_of(target)["format"] == (2 if "folded" in goal else 1)
    for goal in (LAYOUTS[layout], LAYOUTS["cp2, toy2"]):
        results = in_world(ranks, gone_on, goal, config(), tmp_path / "one", None)
        assert worst_relative(results, [expected] * len(results)) < 1e-5, goal


def assert_same_tensors(ours, theirs):
    """Two checkpoints hold the same global tensors, as near as layouts come."""
    found, expected = Checkpoint(ours), Checkpoint(theirs)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, spec in expected.specs.items():
        a, b = torch.empty(spec.shape), torch.empty(spec.shape)
        for source, tensor in ((found, a), (expected, b)):
            source.read_into(name, tensor, spec, ParallelContext())
        assert (a - b).norm() <= 1e-5 * max(b.norm(), 1e-3), name


def checksum(config, layout):
    model = randomize(megazoo.from_config(config, context(**layout), seed=3))
    return checksum_of(model.entries(), model, torch.float32)


def test_its_checksum_is_that_of_one_process(ranks):
    for layout in ("dp4, toy2", "tp2dp2, toy2"):
        assert set(in_world(ranks, checksum, LAYOUTS[layout], config())) == {checksum(config(), {})}


def exported(config, directory, layout):
    model = megazoo.from_config(config, context(**layout), seed=3)
    model.save_parallelized(directory)


def test_its_shards_are_cut_anew_for_tp(ranks, tmp_path):
    in_world(ranks, exported, LAYOUTS["dp4, toy2"], config(), tmp_path / "shards")
    exported(config(), tmp_path / "one", {})
    source = SavedModel(tmp_path / "shards")
    write_shards(source, tmp_path / "tp2", tp=2, pp=1)
    assert manifest_of(tmp_path / "tp2")["format"] == 1
    assert_same_tensors(tmp_path / "tp2", tmp_path / "one")
    assert foreign_entry(tmp_path / "shards") is None
    remove(tmp_path / "shards")
    assert not (tmp_path / "shards").exists()


def test_it_is_planned():
    layers, stack = 3, 4 * 64 * 32  # parameters of a layer's matrices: a third of all
    wide = config(features=64)
    alone = plan(wide)
    (rank,), rest = alone.ranks, alone.parameters - layers * stack
    assert rank.parameters == alone.parameters
    for zero in (0, 1):
        told = plan(wide, {"dp": 4, "folded": {"toy": 2}, "zero": zero})
        (rank,) = told.ranks
        mine = layers * stack // 2
        assert told.parameters == alone.parameters
        assert rank.parameters == rest + mine
        # the bytes of two moments, and of sums over 4 replicas and over 2: buckets have gaps
        state = 8 * (rest / 4 + mine / 2) if zero else 8 * (rest + mine)
        assert rank.optimizer == pytest.approx(state, rel=0.05)
        sums = 2 * 4 * (rest * 3 / 4 + mine / 2)  # a gather of parameters is half of a sum, too
        assert rank.sent_dp == pytest.approx(sums, rel=0.05)
        # matrices are gathered in forward, their gradients scattered in backward
        assert rank.sent_cp == told.microbatches * layers * 2 * 4 * stack / 2
        assert told.layout["folded"] == {"toy": 2}
        assert told.model_flops_per_token == alone.model_flops_per_token
    uneven = {"dp": 4, "folded": {"toy": 4}}
    with pytest.raises(UserError, match="split evenly over toy 4"):
        plan(config(matrices=6), uneven)


def test_what_can_not_be_cut_or_trained_is_refused():
    for matrices, size in ((5, 2), (2, 4)):
        ctx = ParallelContext.virtual(dp=4, folded={"toy": size})
        with pytest.raises(UserError, match=f"split evenly over toy {size}"):
            FAMILIES["toy"].on_meta(config(matrices=matrices), ctx)
    ctx = ParallelContext.virtual(dp=2, folded={"toy": 2})
    model = FAMILIES["toy"].on_meta(config(), ctx)
    shards = (Shard(0, (4,), axis="toy"),)
    layer = model.layers["0"].stack
    layer.multiplied = ("matrix",)
    layer.add_parameter("matrix", ParameterSpec((4, 3), shards))
    with pytest.raises(UserError, match=r"can't train layers.0.stack.matrix: .* over toy"):
        Muon(model)
