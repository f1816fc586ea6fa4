"""What adding up weight gradients moves on CUDA, counted on fake tensors."""

import pytest

from tests.support.fakecuda import WHY_NOT, in_own_process
from tests.support.fakecuda.measure import NO_DROPOUT, training, whole_model
from tests.support.sampling import marked_slow

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))


def trained(layers, preset, rows, length, microbatches, **options):
    """Train a batch of one micro-batch, or of several of its size; returns what was seen."""
    rows *= microbatches
    options = {"layers": layers, "max_positions": length, **options}
    return training(preset, rows, length, microbatches=microbatches, **options)[0]


CASES = {
    "gpt2-1.5b": (48, 1.56e9, 8, 1024, NO_DROPOUT),
    "mpt-7b": (32, 6.65e9, 4, 2048, {}),
    "llama3-8b": (32, 1.005e9, 1, 8192, {"layout": dict(tp=8, rank=1, sequence_parallel=True)}),
}


@pytest.mark.parametrize("preset", marked_slow(list(CASES), lambda _, name: name != "llama3-8b"))
def test_a_micro_batch_after_the_first_moves_what_the_products_read_and_write(preset):
    """They write fp32 gradients; after the first micro-batch they read them, too: 4 bytes more of
    each parameter. Autograd's kernels would move 12 more."""
    layers, parameters, rows, length, options = CASES[preset]
    how = {"preset": preset, "rows": rows, "length": length, **options}
    first, both = (
        in_own_process(whole_model, trained, layers, microbatches=count, **how) for count in (1, 2)
    )
    assert both["bytes"] - 2 * first["bytes"] < 5 * parameters


def test_what_has_waited_is_added_by_its_product():
    options = {"layout": {"pp": 2, "rank": 1}, "schedule": "zb-h1", "microbatches": 4}
    seen = in_own_process(training, "llama3-8b", 4, 64, layers=4, **options)[0]
    moved = {line for line in seen.bytes_of if line.startswith("parallel/deferred")}
    assert not moved
    assert any(line.startswith("torch_internals") for line in seen.bytes_of)
