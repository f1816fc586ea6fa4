"""Mixtures of experts train in every layout as in one process: losses, auxiliary losses, norms,
gradients and weights."""

from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import megazoo
from megazoo.evaluation.scoring import score
from megazoo.layers import ReplicatedLinear
from megazoo.layers.router import expert_loads
from megazoo.models.mixtral import MixtralConfig
from megazoo.optim.newton_schulz import orthogonalised
from megazoo.parallel import ParallelContext
from megazoo.testing import Layout
from tests.support.context_parallel import rows_of_replica
from tests.support.layouts import (
    LONG,
    batches_of,
    in_layout,
    micro_batches,
    model_in,
    sizes_of,
    trained,
    worst_difference,
)
from tests.support.sampling import marked_slow, sampled
from tests.support.training import context, worst_gradient, worst_relative

MIXTRAL = MixtralConfig(
    **{**LONG, "layers": 4},
    kv_heads=2,
    ffn_size=24,
    experts=4,
    router_aux_loss_coef=0.1,
    router_z_loss_coef=0.01,
)
LAYOUTS = [
    "tp2", "tp2+sp", "pp2", "cp2", "dp2+zero", "ep2", "ep4", "tp2ep2", "tp2ep2+sp", "pp2ep2",
    "pp2ep2+zb-h1", "cp2ep2", "cp2ep2+ulysses", "ep2+zero", "dp4ep2+zero", "cp2dp2ep4",
    "ep2+zero2", "dp4ep2+zero2", "ep2+zero3", "dp4ep2+zero3", "tp2cp2ep2+sp", "pp2v2ep2+zb-v",
    "pp2v2ep2",
]  # fmt: skip
KINDS = ("plain", "packed", "padded", "odd")


@pytest.fixture(scope="module")
def one_process():
    known = {}

    def run(config, kind, count):
        key = (config, kind, count)
        if key not in known:
            known[key] = trained(config, batches_of(kind, 2), {}, count=count)
        return known[key]

    return run


FAST = ("tp2ep2+sp", "pp2v2ep2+zb-v", "cp2ep2+ulysses")


@pytest.mark.parametrize(
    "number",
    marked_slow(
        range(len(LAYOUTS)),
        lambda _, number: LAYOUTS[number] not in FAST,
        name=lambda number: LAYOUTS[number],
    ),
)
def test_it_trains_as_in_one_process(ranks, one_process, number):
    layout, kind = Layout.named(LAYOUTS[number]), KINDS[number % len(KINDS)]
    how = {"count": micro_batches(layout), "schedule": layout.schedule, "zero": layout.zero}
    results = ranks(trained, layout.ranks, MIXTRAL, batches_of(kind, 2), sizes_of(layout), **how)
    worst, what = worst_difference(results, one_process(MIXTRAL, kind, micro_batches(layout)))
    assert worst < 1e-5, what


BALANCES = [
    ("batch", "tp2ep2+sp+gpipe", 4), ("batch", "pp2ep2+gpipe", 4), ("batch", "cp2ep2+gpipe", 2),
    ("batch", "pp2+zb-h1", 1), ("bias", "tp2ep2+sp", 4), ("bias", "pp2ep2+zb-h1", 4),
    ("bias", "dp4ep2+zero2", 4), ("none", "ep2", 4),
]  # fmt: skip


@pytest.mark.parametrize(
    ("balance", "layout", "count"),
    marked_slow(
        BALANCES, lambda number, _: number not in (1, 4), name=lambda case: "-".join(case[:2])
    ),
)
def test_every_balance_is_that_of_one_process(ranks, balance, layout, count):
    config = replace(MIXTRAL, router_balance=balance, router_bias_rate=0.01)
    place, batches = Layout.named(layout), batches_of("padded", 2)
    how = {"count": count, "schedule": place.schedule, "zero": place.zero}
    results = ranks(trained, place.ranks, config, batches, sizes_of(place), **how)
    alone = trained(config, batches, {}, count=count, schedule="gpipe")
    worst, what = worst_difference(results, alone)
    assert worst < 1e-5, what


def scores_of(model, rows):
    return torch.stack([column.double() for column in score(model, rows, rows)])


def generated_and_scored(config, layout):
    """What each rank generates, greedily and with beams, and the scores of rows: of the same rows
    on all replicas, and of other rows on each."""
    ctx = context(**layout)
    model, found = model_in(config, ctx).eval(), []
    ids = torch.randint(0, 61, (6, 9), generator=torch.Generator().manual_seed(8))
    own = ids[ctx.dp_rank : ctx.dp_rank + 1 + ctx.dp_rank % 2]
    plain, beams, uncached = {}, {"num_beams": 2}, {"use_cache": False}
    for rows, end, ways in (
        (ids, [3, 7], [plain]), (own, [11], [plain, beams, uncached]), (ids[:1], [5], [plain])
    ):  # fmt: skip
        for how in ways:
            how = {"max_new_tokens": 8, "eos_token_id": end, "pad_token_id": 0, **how}
            found.append((rows, how, model.generate(rows, **how)))
        found.append(
            (rows, None, torch.stack([*map(torch.Tensor.double, score(model, rows, rows))]))
        )
    return found


@pytest.mark.parametrize(
    "layout",
    marked_slow(
        ["ep2", "dp4ep2", "tp2cp2ep2", "pp2ep2", "pp2v2ep2", "pp2v2ep2+zb-v"],
        lambda _, layout: layout != "pp2ep2",
    ),
)
def test_generation_and_scores_are_those_of_one_process(ranks, layout):
    place = Layout.named(layout)
    config = replace(MIXTRAL, layers=place.pp * place.virtual_pp)
    model = model_in(config, ParallelContext()).eval()
    for rank in ranks(generated_and_scored, place.ranks, config, sizes_of(place)):
        for rows, how, found in rank:
            if how is None:
                assert torch.allclose(found, scores_of(model, rows), rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(found, model.generate(rows, **how))


def all_to_one_expert(config, batches, layout, **how):
    """As `trained`, with routers that choose expert 2 for every token."""
    plain = ReplicatedLinear.forward

    def steered(self, x):
        return plain(self, x) + 5 * F.one_hot(torch.tensor(2), 4)

    with mock.patch.object(ReplicatedLinear, "forward", steered):
        return trained(config, batches, layout, **how)


@pytest.mark.parametrize("layout", sampled(["ep2", "tp2ep4+sp", "pp2ep2+zb-h1"], 1, seed=1))
def test_one_expert_gets_all_tokens_and_a_rank_none(ranks, layout):
    config, place = replace(MIXTRAL, experts_per_token=1), Layout.named(layout)
    batches, how = batches_of("plain", 2), {"count": 4, "schedule": place.schedule}
    alone = all_to_one_expert(config, batches, {}, count=4)
    results = ranks(all_to_one_expert, place.ranks, config, batches, sizes_of(place), **how)
    worst, what = worst_difference(results, alone)
    assert worst < 1e-5, what
    _, kept = alone
    unused = torch.cat([part for _, part in kept[0]["layers.0.moe.gate_up.weight"]], 1)[[0, 1, 3]]
    assert not unused.any()


WAYS = {
    "recompute": {"recompute": ("full",)},
    "selective": {"recompute": ("selective",)},
    "frozen experts": {"train": "attention|router|norm"},
    "frozen attention": {"train": r"moe[.]|head"},
}


@pytest.mark.parametrize(
    ("layout", "way"), sampled(product(["tp2ep2+sp", "pp2ep2+zb-h1"], WAYS), 1, seed=2)
)
def test_other_ways_to_train_are_those_of_one_process(ranks, layout, way):
    place, batches = Layout.named(layout), batches_of("padded", 2)
    how = {"count": 4, "model": WAYS[way]}
    alone = trained(MIXTRAL, batches, {}, **how)
    how["schedule"] = place.schedule
    results = ranks(trained, place.ranks, MIXTRAL, batches, sizes_of(place), **how)
    worst, what = worst_difference(results, alone)
    assert worst < 1e-5, what


def test_losses_in_bfloat16_are_near_those_of_one_process(ranks):
    """Rounding moves some tokens to other experts, so only the losses are compared."""
    place, batches = Layout.named("tp2ep2+sp"), batches_of("padded", 3)
    how = {"count": 4, "model": {"dtype": torch.bfloat16}}
    expected = [loss for loss, *_ in trained(MIXTRAL, batches, {}, **how)[0]]
    for history, _ in ranks(trained, 4, MIXTRAL, batches, sizes_of(place), **how):
        assert worst_relative([loss for loss, *_ in history], expected) < 1e-2


@pytest.mark.parametrize(
    "layouts", [("tp1", "tp2ep2"), pytest.param(("pp2ep2+zero",), marks=pytest.mark.slow)]
)
def test_a_checkpoint_resumes_in_other_layouts(ranks, tmp_path, layouts):
    """With its moments: the steps after it, and the weights, are those of one process."""
    batches, config = batches_of("plain", 4), replace(MIXTRAL, router_balance="bias")
    alone = trained(config, batches, {}, count=4)
    place = Layout.named("ep4+zero")
    saved = {"saved": tmp_path / "ep4", "count": 4, "zero": 1}
    ranks(trained, 4, config, batches[:2], sizes_of(place), **saved)
    for layout in layouts:
        place = Layout.named(layout)
        resumed = {"start": tmp_path / "ep4", "count": 4, "zero": place.zero}
        if place.ranks == 1:
            results = [trained(config, batches, {}, **resumed)]
        else:
            results = ranks(trained, place.ranks, config, batches, sizes_of(place), **resumed)
        for history, _ in results:
            assert worst_relative(history, alone[0][2:]) < 1e-5, layout
        worst, name = worst_gradient([kept[-1] for _, kept in results], alone[1][-1])
        assert worst < 1e-5, (layout, name)


def directions_of(config, layout):
    """The change of each matrix by Muon with an almost plain step, and its gradient."""
    model = model_in(config, context(**layout))
    muon = megazoo.optim.Muon(model, lr=1.0, weight_decay=0.0, momentum=0.0, clip_grad=0)
    before = model.layers["0"].moe.gate_up.weight.detach().clone()
    (batch,) = batches_of("plain", 1)
    model.train_batch(**batch, num_microbatches=1)
    gradient = model.layers["0"].moe.gate_up.weight.grad.clone()
    muon.step()
    return before - model.layers["0"].moe.gate_up.weight.detach(), gradient


def test_muon_orthogonalises_gate_and_up_of_each_expert_apart():
    steps, gradients = directions_of(MIXTRAL, {})
    for step, gradient in zip(steps, gradients, strict=True):
        for part, of_part in zip(step.chunk(2), gradient.chunk(2), strict=True):
            factor = max(1.0, part.shape[0] / part.shape[1]) ** 0.5
            expected = factor * orthogonalised(of_part, 5, torch.float32)
            assert (part - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(
    "layout", sampled(["tp2ep2+sp", "ep2+zero", "dp4ep2+zero", "pp2ep2", "tp2+sp"], 1, seed=1)
)
def test_muon_steps_are_those_of_one_process(ranks, layout):
    place, batches = Layout.named(layout), batches_of("plain", 2)
    how = {"count": 4, "kind": "Muon", "zero": place.zero}
    alone = trained(MIXTRAL, batches, {}, count=4, kind="Muon")
    results = ranks(trained, place.ranks, MIXTRAL, batches, sizes_of(place), **how)
    worst, what = worst_difference(results, alone)
    assert worst < 1e-4, what


def loads_after_a_step(config, layout):
    ctx = context(**layout)
    model, (batch,) = model_in(config, ctx), batches_of("padded", 1)
    model.train_batch(**rows_of_replica(batch, ctx), num_microbatches=2)
    return expert_loads(model)


def test_loads_of_experts_are_those_of_one_process(ranks):
    """On every rank of a pipeline; of tokens, not of padding."""
    expected = loads_after_a_step(MIXTRAL, {})
    (batch,) = batches_of("padded", 1)
    tokens = int(batch["attention_mask"].sum()) * MIXTRAL.experts_per_token
    assert [sum(load) for load in expected.values()] == [tokens] * MIXTRAL.layers
    for layout in ("pp2ep2", "tp2cp2ep2+sp"):
        for loads in in_layout(ranks, loads_after_a_step, layout, MIXTRAL):
            assert list(loads.items()) == list(expected.items())
