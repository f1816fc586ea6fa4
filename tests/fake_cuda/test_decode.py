"""Generation on fake CUDA: one graph and at most one host read a token, and no cuDNN, whose plans
depend on the length."""

from itertools import product

import pytest

from tests.support.fakecuda import WHY_NOT, in_own_process
from tests.support.fakecuda.measure import generation
from tests.support.pages import WHY_NOT as NO_PAGES
from tests.support.sampling import marked_slow

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))
PRESETS = ["gpt2-tiny", "llama-tiny", "mpt-tiny"]


def each_token(preset: str, **options):
    """What one more token adds: launches, host waits, and graphs; and the longer run."""
    few, many = (
        in_own_process(generation, preset, new=new, prompt=20, **options) for new in (4, 14)
    )
    assert not few.faults + many.faults
    return (
        (many.launches - few.launches) / 10,
        (many.syncs.total() - few.syncs.total()) / 10,
        (many.launches_of["a graph"] - few.launches_of["a graph"]) / 10,
        many,
    )


@pytest.mark.parametrize(
    ("preset", "padding"),
    marked_slow(list(product(PRESETS, (True, False))), lambda number, _: number not in (0, 3)),
)
def test_a_token_is_one_graph_and_the_host_reads_one_number_or_none(preset, padding):
    launches, syncs, graphs, seen = each_token(preset, padding=padding)
    assert launches <= (8 if padding else 7)  # padding: one more launch, for the positions
    assert (syncs, graphs) == (0, 1)
    assert len(seen.captured) == 1
    assert seen.captured[0] > 50
    assert not any("cudnn" in kernel for kernel in seen.attention)
    pages = any("pages" in kernel for kernel in seen.attention)
    expected = NO_PAGES is None and not padding and preset != "mpt-tiny"
    assert pages is expected, "ALiBi and padding need masks"
    _, syncs, graphs, _ = each_token(preset, padding=padding, settings={"eos_token_id": 5})
    assert (syncs, graphs) == (1, 1)


def test_beams_and_draws_are_graphs_too():
    for settings in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        _, syncs, graphs, _ = each_token("llama-tiny", settings=settings, layers=2)
        assert syncs <= 1
        assert graphs == 1


@pytest.mark.skipif(bool(NO_PAGES), reason=str(NO_PAGES))
@pytest.mark.parametrize(("preset", "kernels"), [("gpt2-tiny", 11), ("llama-tiny", 16)])
def test_a_layer_launches_few_kernels_and_one_graph_is_for_all_lengths(preset, kernels):
    one, two = (
        in_own_process(generation, preset, rows=1, prompt=60, new=8, layers=layers)
        for layers in (1, 2)
    )
    assert len(one.captured) == len(two.captured) == 1, "past 64 tokens"
    assert two.captured[0] - one.captured[0] <= kernels
    assert one.captured[0] - kernels <= 12, "embedding, rotary, norm, head"
    weights = one.captured_bytes[0]["product_bytes"]
    assert 0 < one.captured_bytes[0]["bytes"] < weights


@pytest.mark.parametrize("rank", [0, 3])
def test_a_pipeline_sends_choices_by_gloo_and_activations_one_by_one(rank):
    layout = {"tp": 2, "pp": 2, "rank": rank}
    _, syncs, graphs, seen = each_token("llama-tiny", layout=layout, layers=2)
    assert not graphs
    assert syncs == 2 * (rank == 3), "one for each of the groups, where tokens are chosen"
    kinds = {kind for kind in seen.collectives if "batch" in kind or "send" in kind}
    assert kinds == {"a batch of 1 over pp", "a batch of 1 over pp, by gloo"}
