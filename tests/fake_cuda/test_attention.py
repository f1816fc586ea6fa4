"""What attention and batches do on CUDA, on fake tensors of a fake device."""

import pytest
import torch

from tests.support.fakecuda import WHY_NOT, in_own_process
from tests.support.fakecuda.runs import train_twice
from tests.support.sampling import marked_slow

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))

PRESETS = ("llama-tiny", "gpt2-tiny", "mpt-tiny")
LAYOUTS = ({}, {"pp": 2}, {"pp": 2, "rank": 1}, {"tp": 2, "pp": 2, "sequence_parallel": True})


@pytest.mark.parametrize(
    ("preset", "layout", "on_host"),
    marked_slow(
        [
            (*case, on_host)
            for case in [("gpt2-tiny", {}), *zip(PRESETS, LAYOUTS[1:], strict=True)]
            for on_host in (True, False)
        ],
        lambda number, _: number % 4 in (1, 2),
    ),
)
def test_no_batch_waits_for_the_device(preset, layout, on_host):
    options = {"layout": layout, "on_host": on_host, "documents": True, "layers": 2}
    audit = in_own_process(train_twice, preset, **options)
    lines = (
        "engine/batch.py",
        "layers/alibi.py",
        "layers/attend.py",
        "layers/attention.py",
        "layers/masks.py",
    )
    assert not [sync for sync in audit.syncs if any(line in sync for line in lines)]
    assert not audit.faults


@pytest.mark.parametrize(
    ("preset", "options", "packed"),
    [
        ("gpt2-tiny", {}, True),
        pytest.param("llama-tiny", {}, True, marks=pytest.mark.slow),
        ("llama-tiny", {"layout": LAYOUTS[3]}, True),
        pytest.param("llama-tiny", {"recompute": "full"}, True, marks=pytest.mark.slow),
        ("llama-tiny", {"recompute": "selective"}, True),
        pytest.param("mpt-tiny", {"alibi": False}, True, marks=pytest.mark.slow),
        ("mpt-tiny", {}, False),
        ("llama-tiny", {"attention_dropout": 0.1}, False),
        ("llama-tiny", {"dtype": torch.float32}, False),
        pytest.param("llama-tiny", {"on_host": False}, False, marks=pytest.mark.slow),
        ("llama-tiny", {"capability": (7, 5)}, False),
    ],
    ids=str,
)
def test_documents_go_by_the_kernel_that_takes_each_alone(preset, options, packed):
    usual = {"on_host": True, "documents": True, "layers": 2}
    audit = in_own_process(train_twice, preset, **usual | options)
    assert audit.attention
    assert all(("varlen" in kernel) is packed for kernel in audit.attention)
    assert not audit.faults
