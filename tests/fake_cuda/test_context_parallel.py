"""Context parallelism on CUDA, on fake tensors of a fake device: no wait, no refused transfer, fast
attention, masks made once, and few copies. See tests/support/fakecuda."""

import re
from itertools import product

import pytest
import torch

from tests.support.fakecuda import WHY_NOT, in_own_process
from tests.support.fakecuda.measure import NO_DROPOUT, evaluation, generation, training
from tests.support.fakecuda.runs import on_rank, train_twice
from tests.support.sampling import marked_slow, sampled

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))

METHODS = ("allgather", "ulysses")
CUBE = {"tp": 2, "cp": 2, "dp": 2, "sequence_parallel": True}
PRESETS = {
    "gpt2-tiny": NO_DROPOUT,
    "llama-tiny": {},
    "mpt-tiny": {},
    "gpt2-tiny, dropout": dict.fromkeys(NO_DROPOUT, 0.1),
    "mpt-tiny, learned positions": {"alibi": False},
}
OPTIONS = {
    "one stage": {},
    "documents": {"documents": True, "on_host": True},
    "documents on the device": {"documents": True},
    "fp32": {"dtype": torch.float32, "documents": True},
    "zb-h1": {"layout": {"pp": 2, "cp": 2}, "schedule": "zb-h1", "documents": True},
    "interleaved": {"layout": {"pp": 2, "cp": 2, "virtual": 2}, "layers": 4},
    "cube": {"layout": CUBE, "recompute": "selective", "length": 30},
    "ZeRO-1": {"layout": CUBE, "optimizer": {"zero": 1}, "recompute": "full"},
    "frozen": {"layout": CUBE, "train_only": "norm"},
    "own loop": {"layout": CUBE, "own_loop": True},
    "classifier": {"num_labels": 3, "pad_token_id": 0},
}


def with_method(method: str, options: dict) -> dict:
    layout = {"cp": 2, **options.get("layout", {}), "cp_method": method}
    return {"rows": 8, **options, "layout": layout}


CASES = [  # each option meets each method, and presets and ranks in turn
    (list(PRESETS)[(number + turn) % len(PRESETS)], name, method, ("first", "last")[number % 2])
    for number, name in enumerate(OPTIONS)
    for turn, method in enumerate(METHODS)
]


@pytest.mark.parametrize(("preset", "name", "method", "which"), sampled(CASES, 4, seed=4))
def test_nothing_is_refused_and_no_host_waits(preset, name, method, which):
    """A classifier and a loop of one's own wait as they do without context parallelism."""
    options = with_method(method, {"layers": 2, **OPTIONS[name], **PRESETS[preset]})
    options, preset = on_rank(which, options), preset.partition(",")[0]
    if "own_loop" in options:
        audits = in_own_process(training, preset, microbatches=2, **options)
    else:
        audits = [in_own_process(train_twice, preset, **options)]
    for audit in audits:
        assert not audit.faults
        assert not audit.syncs or name in ("classifier", "own loop")
        assert not [kernel for kernel in audit.attention if kernel.startswith("sm90 math")]


@pytest.mark.parametrize("method", marked_slow(METHODS, lambda number, _: number > 0))
def test_dynamic_rotary_positions_wait_for_one_number_a_micro_batch(method):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    options = with_method(
        method, {"rope_scaling": scaling, "documents": True, "on_host": True, "layers": 2}
    )
    audit = in_own_process(train_twice, "llama-tiny", **options)
    assert list(audit.syncs.values()) in ([], [2])
    assert all("layers/rotary.py" in sync for sync in audit.syncs)


EVALUATED = list(product(["gpt2-tiny", "llama-tiny", "mpt-tiny"], METHODS))


@pytest.mark.parametrize(
    ("preset", "method"), marked_slow(EVALUATED, lambda number, _: number not in (0, 3, 4))
)
def test_evaluation_and_generation_are_not_refused(preset, method):
    layout = {"dp": 2, "cp": 2, "cp_method": method, "rank": 3}
    for forward in (False, True):
        watched = in_own_process(evaluation, preset, layout=layout, forward=forward)
        assert watched.launches
        assert not watched.faults
    watched = in_own_process(generation, preset, rows=8, layout=layout)
    assert watched.launches
    assert not watched.faults
    assert not [each for each in watched.collectives if each.endswith("over cp")]


def kernels_of(preset: str, **options) -> dict[str, int]:
    """Return how often each kernel of Hopper runs, of how many queries and keys."""
    found = {}
    for seen, count in in_own_process(train_twice, preset, **options).attention.items():
        shape = re.search(r"q \[(.*?)\] k \[(.*?)\]", seen).groups()
        place = 0 if "varlen" in seen else 1
        queries, keys = (side.split(", ")[place] for side in shape)
        kernel = re.match(r"sm90 (\w+)", seen)[1]
        name = f"{kernel} {queries} of {keys}"
        found[name] = found.get(name, 0) + count
    return found


# Sequences of 16 tokens, two rows a micro-batch: rank 1 of 2 has tokens 4 to 11, in two chunks.
VARLEN = {
    "allgather": {"varlen 8 of 16": 2, "varlen 8 of 24": 2},
    "ulysses": {"varlen 32 of 32": 2},
}
MASKED = {
    "allgather": {"{} 4 of 8": 2, "{} 4 of 12": 2},
    "ulysses": {"{} 16 of 16": 2},
}


KERNELS = [
    ("gpt2-tiny", NO_DROPOUT, "varlen"),
    ("llama-tiny", {}, "varlen"),
    ("llama-tiny", {"dtype": torch.float16}, "varlen"),
    ("llama-tiny", {"recompute": "selective"}, "varlen"),
    ("mpt-tiny", {"alibi": False}, "varlen"),
    ("mpt-tiny", {}, "cudnn"),
    ("gpt2-tiny", dict.fromkeys(NO_DROPOUT, 0.1), "cudnn"),
    ("llama-tiny", {"dtype": torch.float32}, "efficient"),
    ("llama-tiny", {"on_host": False}, "cudnn"),
]
KERNEL_CASES = [
    (*which, documents, method)
    for which, documents, method in product(KERNELS, (False, True), METHODS)
]


@pytest.mark.parametrize(
    ("preset", "options", "kernel", "documents", "method"),
    sampled(KERNEL_CASES, 3, seed=4, name=str),
)
def test_chunks_go_by_the_kernel_that_is_fast(preset, options, kernel, documents, method):
    if options.get("on_host") is False and not documents:
        kernel = "varlen"  # only of documents on the device the boundaries are not known
    given = {"on_host": True, "documents": documents, "rows": 4, "layers": 1, **options}
    layout = {"cp": 2, "rank": 1, "cp_method": method}
    found = kernels_of(preset, layout=layout, length=16, **given)
    twice = 2 if "recompute" in options else 1
    if kernel == "varlen":
        expected = VARLEN[method]
    else:  # ulysses without documents needs no mask, so that other kernels may do
        expected = {name.format(kernel): count for name, count in MASKED[method].items()}
        if method == "ulysses" and not documents and preset != "mpt-tiny":
            other = "efficient" if options.get("dtype") == torch.float32 else "cudnn"
            expected = {name.format(other): count for name, count in MASKED[method].items()}
    assert found == {name: twice * count for name, count in expected.items()}


def masks_made(preset: str, layers: int, **options) -> int:
    """Count the kernels that make masks, over two micro-batches."""
    seen = train_twice(preset, layers=layers, **options)
    lines = ("layers/masks.py", "layers/alibi.py", "models/masks.py")
    return sum(n for line, n in seen.launches_of.items() if line.startswith(lines))


MASK_CASES = [
    (*which, documents, method)
    for which, documents, method in product(
        [("llama-tiny", {}), ("llama-tiny", {"dtype": torch.float32}), ("mpt-tiny", {})],
        (False, True),
        METHODS,
    )
]


@pytest.mark.parametrize(
    ("preset", "options", "documents", "method"), sampled(MASK_CASES, 1, seed=4, name=str)
)
def test_masks_are_made_for_all_layers_at_once(preset, options, documents, method):
    how = {"documents": documents, "on_host": True, **options, "recompute": "selective"}
    how["layout"] = {"cp": 2, "rank": 1, "cp_method": method}
    one, three = (in_own_process(masks_made, preset, layers, **how) for layers in (1, 3))
    assert one == three
    if preset == "mpt-tiny" and not documents:
        assert not one  # they are kept from the batch before


def moved(layers: int) -> int:
    """Return the elementwise bytes that the lines move which share keys and values."""
    options = {"layers": layers, "max_positions": 8192, "layout": {"cp": 2, "rank": 1}}
    seen = training("llama3-8b", 1, 8192, **options)[0].bytes_of
    lines = ("layers/context_parallel.py", "parallel/regions.py", "parallel/sequence.py")
    return sum(moved for line, moved in seen.items() if line.startswith(lines))


def test_a_layer_copies_little_to_share_keys_and_values():
    """Of n keys and values of a sequence, and q of a rank's queries. Forward: the rank's part is
    stacked, all are put in order, queries are copied, the results are joined. Backward: all are put
    in order again, gradients are zeroed in fp32, added to it (a rank's two chunks see 1.25
    sequences), and its part is rounded."""
    one, two = (in_own_process(moved, layers) for layers in (1, 2))
    n, q = 2 * 8192 * 8 * 128, 4096 * 32 * 128
    forward = 4 * n / 2 + 4 * n + 4 * q + 4 * q  # bytes read and written, 2 each
    backward = 4 * n + 4 * n + (2 + 4 + 4) * 1.25 * n + (4 + 2) * n / 2
    assert two - one < 1.1 * (forward + backward)
