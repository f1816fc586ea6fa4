"""What the layers move on CUDA, counted on fake tensors: see tests/support/fakecuda."""

import pytest

from tests.support.fakecuda import WHY_NOT, in_own_process
from tests.support.fakecuda.measure import training, whole_model

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))


def trained(layers: int, **options):
    return training("llama3-8b", 1, 8192, layers=layers, max_positions=8192, **options)[0]


def test_a_micro_batch_of_llama3_8b_moves_at_most_60_gb_between_products():
    layout = {"tp": 8, "rank": 1, "sequence_parallel": True}
    moved = in_own_process(whole_model, trained, layers=32, layout=layout)
    assert moved["bytes"] < 60e9
    assert moved["launches"] < 2100  # written out, each RMSNorm would take 18 kernels


@pytest.mark.parametrize(("tp", "pieces"), [(1, False), (2, False), (1, True)])
def test_no_product_over_an_odd_vocabulary_is_misaligned(tp, pieces):
    options = {"layout": {"tp": tp, "rank": 0}, "vocab_size": 50257}
    seen = in_own_process(training, "gpt2-tiny", 128 if pieces else 2, 64, **options)[0]
    launches = sum(n for line, n in seen.launches_of.items() if "fused_cross_entropy" in line)
    assert (launches > 40) == pieces  # there are four
    assert not seen.misaligned
