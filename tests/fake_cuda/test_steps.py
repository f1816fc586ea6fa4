"""What runs on CUDA, run on fake tensors of a fake device: every option, on the first rank and the
last, of three families. See tests/support/fakecuda."""

from itertools import product

import pytest
import torch

from tests.support.fakecuda import WHY_NOT, in_own_process
from tests.support.fakecuda.measure import NO_DROPOUT, evaluation, generation, training
from tests.support.fakecuda.runs import on_rank
from tests.support.sampling import marked_slow

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))

PRESETS = ("gpt2-tiny", "llama-tiny", "mpt-tiny")
RANKS = ("first", "last")
CUBE = {"tp": 2, "pp": 2, "dp": 2}
TRAINING = {
    "one rank": {},
    "fp32": {"dtype": torch.float32},
    "float16": {"dtype": torch.float16, "layout": CUBE},
    "tp x pp x dp": {"layout": CUBE},
    "sequence parallel": {"layout": {**CUBE, "sequence_parallel": True}},
    "tokens that tp does not divide": {
        "layout": {"tp": 2, "pp": 2, "sequence_parallel": True},
        "length": 15,
    },
    "gpipe": {"layout": CUBE, "schedule": "gpipe"},
    "zb-h1": {"layout": CUBE, "schedule": "zb-h1"},
    "interleaved": {"layout": {"pp": 2, "virtual": 2}, "layers": 4},
    "selective recompute": {"layout": CUBE, "recompute": "selective"},
    "full recompute": {"layout": CUBE, "recompute": "full"},
    "padding": {"layout": CUBE, "padding": True},
    "documents": {"layout": CUBE, "documents": True},
    "ZeRO-1": {"layout": CUBE, "optimizer": {"zero": 1}},
    "ZeRO-2": {"layout": CUBE, "optimizer": {"zero": 2}},
    "ZeRO-1, fp32": {"layout": CUBE, "optimizer": {"zero": 1}, "dtype": torch.float32},
    "offload": {"layout": CUBE, "optimizer": {"zero": 1, "offload": True}},
    "no clipping": {"layout": CUBE, "optimizer": {"clip_grad": 0.0}},
    "untied": {"layout": CUBE, "tie_embeddings": False},
    "frozen but for norms": {"layout": CUBE, "train_only": "norm"},
    "a loop of one's own": {"layout": CUBE, "own_loop": True},
    "a classifier": {"layout": CUBE, "num_labels": 3, "pad_token_id": 0},
}
OF_A_FAMILY = {
    "gpt2-tiny": {"no dropout": NO_DROPOUT},
    "llama-tiny": {
        "one KV head": {"kv_heads": 1},
        "dynamic rotary positions": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    },
    "mpt-tiny": {
        "learned positions": {"alibi": False},
        "normalised heads": {"qk_norm": True, "clip_qkv": 1.0, "kv_heads": 2},
        "dropout": dict.fromkeys(NO_DROPOUT, 0.1),
    },
}
GENERATED = {
    "greedy": {},
    "padding": {"padding": True},
    "beams": {"settings": {"num_beams": 3}},
    "drawn": {"settings": {"do_sample": True, "num_return_sequences": 2}},
    "penalties": {"settings": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3}},
    "no cache": {"settings": {"use_cache": False}},
}


def in_turn(cases: list[tuple], names: list[str]) -> list:
    """Cases (preset, name, which) as parameters: in `make test` each name has one family, and the
    first rank or the last, in turn; names of a single family have only the last."""

    def is_slow(_, case: tuple) -> bool:
        _, name, *which = case
        if name not in names:
            return which == ["first"]
        number = names.index(name)
        return case != (PRESETS[number % 3], name, *[RANKS[number // 3 % 2] for _ in which])

    return marked_slow(cases, is_slow, name="-".join)


TRAINED = [
    (preset, name, which)
    for preset in PRESETS
    for name in TRAINING | OF_A_FAMILY[preset]
    for which in RANKS
]


@pytest.mark.parametrize(("preset", "name", "which"), in_turn(TRAINED, list(TRAINING)))
def test_nothing_that_trains_is_refused(preset, name, which):
    options = {"layers": 2, **(TRAINING | OF_A_FAMILY[preset])[name]}
    options = {"rows": 8, "microbatches": 2, **on_rank(which, options)}
    trained, stepped = in_own_process(training, preset, **options)
    assert trained.launches
    assert stepped.launches
    assert not trained.faults + stepped.faults


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_that_evaluates_is_refused(preset):
    """Neither eval_batch nor a call of the model."""
    for forward in (False, True):
        for layout in ({}, {**CUBE, "rank": 0}, {**CUBE, "rank": 7}):
            watched = in_own_process(evaluation, preset, layout=layout, forward=forward, layers=2)
            assert watched.launches
            assert not watched.faults


@pytest.mark.parametrize(
    ("preset", "name"), in_turn(list(product(PRESETS, GENERATED)), list(GENERATED))
)
def test_nothing_that_generates_is_refused(preset, name):
    for layout in ({}, {"tp": 2, "pp": 2, "rank": 0}, {"tp": 2, "pp": 2, "rank": 3}):
        watched = in_own_process(generation, preset, layout=layout, layers=2, **GENERATED[name])
        assert watched.launches
        assert not watched.faults
