"""What the layers move on CUDA, counted on fake tensors: see tests/fakecuda."""

import pytest
from fakecuda import WHY_NOT, in_own_process
from fakecuda.measure import training, whole_model

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))


def trained(layers: int, **options):
    return training("llama3-8b", 1, 8192, layers=layers, max_positions=8192, **options)[0]


def test_a_micro_batch_of_llama3_8b_moves_at_most_60_gb_between_products():
    layout = {"tp": 8, "rank": 1, "sequence_parallel": True}
    moved = in_own_process(whole_model, trained, layers=32, layout=layout)
    assert moved["bytes"] < 60e9
    assert moved["launches"] < 2100  # written out, each RMSNorm would take 18 kernels
