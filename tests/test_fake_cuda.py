"""What runs on CUDA, run on fake tensors of a fake device: see tests/fakecuda."""

import pytest
from fakecuda import WHY_NOT, in_own_process
from fakecuda.measure import training

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))


@pytest.mark.parametrize("preset", ["gpt2-tiny", "llama-tiny", "mpt-tiny"])
@pytest.mark.parametrize("rank", [0, 7])
def test_no_tensor_is_on_a_wrong_device_or_refused_by_nccl(preset, rank):
    layout = {"tp": 2, "pp": 2, "dp": 2, "rank": rank, "sequence_parallel": True}
    trained, stepped = in_own_process(
        training, preset, rows=8, layout=layout, microbatches=2, padding=True, optimizer={"zero": 1}
    )
    assert trained.launches
    assert stepped.launches
    assert not trained.faults + stepped.faults
