"""An optimizer's step on fake CUDA: how many kernels it launches, and where the host waits."""

from itertools import product

import pytest
import torch

from megazoo.optim import AdamW, Muon, clip_grad_norm
from tests.support.fakecuda import WHY_NOT, in_own_process
from tests.support.fakecuda.measure import build, context, seen, training, watched
from tests.support.sampling import marked_slow

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))
GROUPS = {
    "plain": {},
    "ZeRO-1 of 2": {"layout": {"dp": 2, "rank": 1}, "zero": 1},
    "ZeRO-1 of 8": {"layout": {"dp": 8, "rank": 1}, "zero": 1},
    "float16": {"layout": {"dp": 8, "rank": 1}, "zero": 1, "dtype": torch.float16},
    "offload": {"offload": True},
    "offload in float32": {"offload": True, "dtype": torch.float32},
    "ZeRO-1 of 64": {"layout": {"dp": 64, "rank": 1}, "zero": 1},
}


def stepped(
    cuda=13, layout=None, dtype=torch.bfloat16, own=False, kind=AdamW, layers=48, **settings
):
    """Sum gradients of gpt2-1.5b, all of it, over the replicas, then step, by torch built for CUDA
    12 or 13; returns what was seen of each. own: clip, as for an optimizer of one's own. layers: of
    the model, which has 48."""
    from tests.support.fakecuda import audit

    audit.longer_arguments = cuda == 13
    try:
        with watched():
            model = build("gpt2-1.5b", context(**(layout or {})), dtype, layers=layers)
            optimizer = kind(model, **settings)
            buckets = model.engine.gradients.buckets
            buckets.start(1)
            buckets.fill_missing()
            seen()
            buckets.wait_for_sums(2.0 if dtype == torch.float16 else 1.0)
            summed = seen()
            clip_grad_norm(model, 1.0) if own else optimizer.step()
            return summed, seen()
    finally:
        audit.longer_arguments = False


LIMIT = {13: 200, 12: 300}  # kernels
# Where the host waits, and the most buckets: they grow with the replicas.
STEPS = {
    "plain": (0, 0),
    "ZeRO-1 of 2": (0, 60),
    "ZeRO-1 of 8": (0, 60),
    "ZeRO-1 of 64": (0, 30),
    "float16": (1, 60),
}
FAST = {("float16", 13)}


@pytest.mark.parametrize(
    ("name", "cuda"), marked_slow(list(product(STEPS, LIMIT)), lambda _, case: case not in FAST)
)
def test_a_step_is_a_few_kernels_and_waits_for_none(name, cuda):
    """float16 asks once whether gradients overflowed. Each pass over 1.5 billion elements is 12
    kernels by CUDA 13's rules, 78 by CUDA 12's."""
    waits, most_sums = STEPS[name]
    summed, step = in_own_process(stepped, cuda, **GROUPS[name])
    assert 0 < step.launches <= LIMIT[cuda]
    assert sum(step.syncs.values()) == waits, step.syncs
    assert summed.launches <= 200
    assert name == "ZeRO-1 of 64" or step.bytes > 10e9, "nothing was updated"
    assert not summed.syncs + summed.faults + step.faults
    sums = summed.collectives["reduce_scatter over dp"]
    assert (0 < sums < most_sums) if most_sums else not sums
    assert step.collectives["all_gather over dp"] == sums


@pytest.mark.parametrize("name", ["ZeRO-1 of 8", pytest.param("plain", marks=pytest.mark.slow)])
def test_muons_step_waits_for_nothing_and_computes_its_share(name):
    """A matrix takes 15 products, and some passes to bring it together and to step it."""
    layers = 8
    _, step = in_own_process(stepped, kind=Muon, layers=layers, **GROUPS[name])
    assert not step.syncs + step.faults
    matrices = layers * 6 / GROUPS[name].get("layout", {"dp": 1})["dp"]
    assert 15 * matrices < step.launches < 40 * matrices + 20 * layers * 6


@pytest.mark.parametrize(
    "name", ["offload", pytest.param("offload in float32", marks=pytest.mark.slow)]
)
def test_an_offloaded_step_waits_for_nothing_but_pieces_of_gradients(name):
    _, step = in_own_process(stepped, layers=12, **GROUPS[name])
    assert not step.faults
    (where,) = step.syncs
    assert where.startswith("a stream is waited for at optim/offload.py")
    h = 1600
    parameters = 12 * (12 * h * h + 13 * h) + (50257 + 1024 + 2) * h
    pieces = -(-parameters // (1 << 24))  # of a piece each
    assert step.syncs[where] <= pieces + 2
    assert step.launches < 600 / 93 * pieces  # of 48 layers 600, which are 93 pieces


def test_clipping_in_a_loop_of_ones_own_waits_for_nothing():
    _, step = in_own_process(stepped, own=True, layers=16)
    assert not step.syncs
    assert step.launches < 200


def test_replicated_heads_under_zero_1_need_no_masks():
    """LLaMA with one KV head: of its two copies over tp only one counts."""
    for rank in range(4):
        options = {"layout": {"tp": 2, "dp": 2, "rank": rank}, "optimizer": {"zero": 1}}
        trained, step = in_own_process(training, "llama-tiny", **options, kv_heads=1, layers=2)
        assert not trained.syncs + step.syncs + step.faults, rank
