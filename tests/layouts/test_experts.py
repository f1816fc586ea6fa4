"""Mixtures of experts train in every layout as in one process: losses, auxiliary losses, norms,
gradients and weights."""

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
