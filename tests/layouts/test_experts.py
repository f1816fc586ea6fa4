"""Mixtures of experts train in every layout as in one process: losses, auxiliary losses, norms,
gradients and weights."""

from dataclasses import replace

import pytest

from megazoo.models.mixtral import MixtralConfig
from megazoo.testing import Layout
from tests.support.layouts import (
    LONG,
    batches_of,
    micro_batches,
    sizes_of,
    trained,
    worst_difference,
)

MIXTRAL = MixtralConfig(
    **LONG, kv_heads=2, ffn_size=24, experts=4, router_aux_loss_coef=0.1, router_z_loss_coef=0.01
)
LAYOUTS = [
    "tp2", "tp2+sp", "pp2", "cp2", "dp2+zero", "ep2", "ep4", "tp2ep2", "tp2ep2+sp", "pp2ep2",
    "pp2ep2+zb-h1", "cp2ep2", "cp2ep2+ulysses", "ep2+zero", "dp4ep2+zero", "cp2dp2ep4",
    "tp2cp2ep2+sp", "pp2v2ep2+zb-v", "pp2v2ep2",
]  # fmt: skip
KINDS = ("plain", "packed", "padded", "odd")


@pytest.fixture(scope="module")
def one_process():
    known = {}

    def run(config, kind, count):
        key = (config, kind, count)
        if key not in known:
            known[key] = trained(config, batches_of(kind, 3), {}, count=count)
        return known[key]

    return run


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=LAYOUTS)
def test_it_trains_as_in_one_process(ranks, one_process, number):
    layout, kind = Layout.named(LAYOUTS[number]), KINDS[number % len(KINDS)]
    how = {"count": micro_batches(layout), "schedule": layout.schedule, "zero": layout.zero}
    results = ranks(trained, layout.ranks, MIXTRAL, batches_of(kind, 3), sizes_of(layout), **how)
    worst, what = worst_difference(results, one_process(MIXTRAL, kind, micro_batches(layout)))
    assert worst < 1e-5, what


BALANCES = [
    ("batch", "tp2ep2+sp+gpipe", 4), ("batch", "pp2ep2+gpipe", 4), ("batch", "cp2ep2+gpipe", 2),
    ("batch", "pp2+zb-h1", 1), ("bias", "tp2ep2+sp", 4), ("bias", "pp2ep2+zb-h1", 4),
    ("bias", "dp4ep2+zero", 4), ("none", "ep2", 4),
]  # fmt: skip


@pytest.mark.parametrize(("balance", "layout", "count"), BALANCES)
def test_every_balance_is_that_of_one_process(ranks, balance, layout, count):
    config = replace(MIXTRAL, router_balance=balance, router_bias_rate=0.01)
    place, batches = Layout.named(layout), batches_of("padded", 3)
    how = {"count": count, "schedule": place.schedule, "zero": place.zero}
    results = ranks(trained, place.ranks, config, batches, sizes_of(place), **how)
    alone = trained(config, batches, {}, count=count, schedule="gpipe")
    worst, what = worst_difference(results, alone)
    assert worst < 1e-5, what
