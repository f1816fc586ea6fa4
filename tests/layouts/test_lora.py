"""Adapters train alike in every layout, and leave the weights beside them as they were."""

import pytest

from megazoo.testing import Layout
from tests.support.layouts import LAYOUTS, in_layout
from tests.support.lora import assert_alike, one_process, train
from tests.support.sampling import marked_slow, pairs_covered
from tests.support.training import MODELS, tiny_config

HOW = {
    "plain": {},
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


def possible(config, targets, layout, how):
    """Whether there is such a case, and it should be as in one process.

    Replicas and context-parallel ranks drop other elements; so do tp ranks of what is cut over
    them, the input of row-parallel layers.
    """
    place = Layout.named(layout)
    if how == "own loop" and place.pp * place.dp > 1:  # its loss is a replica's
        return False
    if how.startswith("dropout"):
        alike = place.tp == 1 or targets == "q and v"
        return place.dp * place.cp == 1 and alike
    return True


CASES = pairs_covered(list(CONFIGS), list(TARGETS), LAYOUTS, list(HOW), possible=possible)
FAST = [  # each way to cut adapters, each family, each way to train
    ("llama", "all", "tp2pp2+sp", "plain"),
    ("llama", "all", "tp4", "norms, too"),
    ("mpt", "all", "tp2cp2+sp+ulysses", "plain"),
    ("gpt2, tied", "all", "cp2dp2+zero", "microbatches"),
    ("gpt2", "third layer", "pp2+zb-h1", "interval"),
    ("heavy head", "all", "pp2+zb-h1", "plain"),
    ("mpt", "q and v", "tp2", "dropout, recomputed"),
    ("llama", "last layer", "pp2v2", "dropout, selective"),
    ("gpt2", "q and v", "cp2", "own loop"),
    ("llama", "first layer", "dp2", "offload"),
    ("mpt", "all", "cp4+ulysses", "full"),
]


@pytest.mark.parametrize(
    ("config", "targets", "layout", "how"),
    marked_slow(
        [*FAST, *(case for case in CASES if case not in FAST)],
        lambda number, _: number >= len(FAST),
        name="-".join,
    ),
)
def test_adapters_train_as_in_one_process(ranks, request, config, targets, layout, how):
    """Three steps in `make test`, else ten: each pair of settings, and all layouts."""
    steps = 10 if request.node.get_closest_marker("slow") else 3
    place, what = Layout.named(layout), TARGETS[targets]
    of_all = {key: HOW[how][key] for key in ("by", "trained", "dropout") if key in HOW[how]}
    expected = one_process(CONFIGS[config], targets=what, steps=steps, **of_all)
    settings = {"schedule": place.schedule, "zero": place.zero, **HOW[how]}
    found = in_layout(ranks, train, layout, CONFIGS[config], targets=what, steps=steps, **settings)
    assert_alike(found, expected)
