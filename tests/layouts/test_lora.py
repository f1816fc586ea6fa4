"""Adapters train alike in every layout, and leave the weights beside them as they were."""

import random
from functools import partial

import pytest

from tests.support.lora import assert_alike, one_process, train
from tests.support.sampling import pairs_covered
from tests.support.training import (
    MODELS,
    layout_name,
    run_in_layout,
    tiny_config,
)

LAYOUTS = {
    "tp2": dict(tp=2),
    "tp2sp": dict(tp=2, sp=True),
    "tp4": dict(tp=4),
    "pp2": dict(pp=2),
    "tp2pp2": dict(tp=2, pp=2),
    "zb-h1": dict(pp=2),
    "zero": dict(dp=2),
    "cp2": dict(cp=2),
    "ulysses": dict(cp=2, method="ulysses"),
}
HOW = {
    "plain": {},
    "zb-h1": {"schedule": "zb-h1"},
    "gpipe": {"schedule": "gpipe"},
    "zero": {"zero": 1},
    "offload": {"offload": True},
    "selective": {"recompute": ("selective",)},
    "full": {"recompute": ("full", 1)},
    "interval": {"recompute": ("full", 2)},
    "own loop": {"by": "own loop"},
    "microbatches": {"by": "microbatches"},
    "norms, too": {"trained": "lora|norm"},
    "dropout": {"dropout": 0.2},
    "dropout, recomputed": {"dropout": 0.2, "recompute": ("full", 2)},
    "dropout, selective": {"dropout": 0.2, "recompute": ("selective",)},
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if number % 3 == turn else pytest.mark.slow)
        for turn, name in enumerate(["gpt2", "llama", "mpt"])
        for number, layout in enumerate(LAYOUTS)
    ],
)
def test_twenty_steps_are_those_of_one_process(ranks, name, layout):
    how = HOW.get(layout, {})
    assert_alike(
        run_in_layout(ranks, train, LAYOUTS[layout], MODELS[name], **how),
        one_process(MODELS[name]),
    )


# The last has a head that weighs more than all layers, so that the last stage has none of these.
CONFIGS = {
    "llama": MODELS["llama"],
    "gpt2": tiny_config(tied=False),
    "gpt2, tied": MODELS["gpt2"],
    "mpt": MODELS["mpt"],
    "heavy head": tiny_config(tied=False, vocab_size=1000),
}
TARGETS = {
    "all": "all-linear",
    "q and v": ("q", "v"),
    "first layer": ("layers.0.attention.q", "layers.0.mlp.down"),
    "third layer": ("layers.2.attention.v", "layers.2.attention.output"),
    "last layer": ("layers.4.attention.v", "layers.4.mlp.down"),
}
MANY_LAYOUTS = [
    {}, dict(tp=2), dict(tp=2, sp=True), dict(tp=4), dict(tp=4, sp=True), dict(dp=2), dict(pp=2),
    dict(pp=2, v=2), dict(pp=4), dict(tp=2, pp=2), dict(tp=2, pp=2, sp=True), dict(pp=2, dp=2),
    dict(tp=2, dp=2), dict(cp=2), dict(cp=2, method="ulysses"), dict(tp=2, cp=2, sp=True),
    dict(pp=2, cp=2),
]  # fmt: skip


def possible(config, targets, layout, how):
    """Whether there is such a case, and it should be as in one process.

    Replicas and context-parallel ranks drop other elements; so do tp ranks of what is cut over
    them, the input of row-parallel layers.
    """
    size = {axis: layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp", "v")}
    if how == "zb-h1" and (size["pp"] == 1 or size["v"] > 1):
        return False
    if how == "gpipe" and size["pp"] == 1:
        return False
    if how == "zero" and size["dp"] * size["cp"] == 1:
        return False
    if how == "own loop" and (size["pp"] > 1 or size["dp"] > 1):  # its loss is a replica's
        return False
    if how.startswith("dropout"):
        alike = size["tp"] == 1 or targets == "q and v"
        return size["dp"] * size["cp"] == 1 and alike
    return bool(layout) or how != "plain"


CASES = pairs_covered(list(CONFIGS), list(TARGETS), MANY_LAYOUTS, list(HOW), possible=possible)
FAST = {  # a case of each of these, and of some layout
    how: random.Random(2).choice([case for case in CASES if case[3] == how])
    for how in ("zb-h1", "zero", "interval", "norms, too", "dropout, recomputed", "microbatches")
}


def name_of(part) -> str:
    return layout_name(part) if isinstance(part, dict) else part


@pytest.mark.parametrize(
    ("config", "targets", "layout", "how"),
    [
        pytest.param(*case, marks=[] if case in FAST.values() else pytest.mark.slow)
        for case in CASES
    ],
    ids=name_of,
)
def test_every_two_settings_go_together(ranks, config, targets, layout, how):
    what, settings = TARGETS[targets], HOW[how]
    of_all = {key: settings[key] for key in ("by", "trained", "dropout") if key in settings}
    expected = one_process(CONFIGS[config], targets=what, steps=4, **of_all)
    run = partial(run_in_layout, ranks, train, layout, CONFIGS[config])
    assert_alike(run(targets=what, steps=4, **settings), expected)
