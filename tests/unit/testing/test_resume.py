"""The check of resuming: runs resume in every pair of layouts. The bugs that it finds are in
test_gallery.py."""

import itertools
import random

import pytest

from megazoo.errors import UserError
from megazoo.models.registry import find_config
from megazoo.programs import check_parallel as tool
from megazoo.testing import Layout, check_resume, pairs_of, shrink
from tests.support.sampling import marked_slow

LAYOUTS = ["tp2", "tp2+sp", "pp2", "pp2v2+zb-v", "dp2+zero", "cp2", "tp2dp2+zero", "tp2pp2"]
PAIRS = [pairs_of([f"{one}:{other}"])[0] for one, other in itertools.product(LAYOUTS, repeat=2)]
WAYS = {
    "gpt2": {},
    "llama": {},
    "mixtral": {},
    "llama, LoRA": {"lora_rank": 2},
    "gpt2, Muon": {"optimizer": "muon"},
    "llama, bfloat16": {"dtype": "bfloat16"},
    "gpt2, offload": {"offload": True},
    "llama, offload in bfloat16": {"offload": True, "dtype": "bfloat16"},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("way", "count"),
    marked_slow(
        [("llama", 1), *((way, 12) for way in WAYS)], lambda number, _: number > 0, name=str
    ),
)
def test_runs_resume_in_other_layouts(way, count):
    family = way.partition(",")[0]
    config = shrink(find_config(f"{family}-tiny"))
    pairs = random.Random(way).sample(PAIRS, count)
    verdicts = list(check_resume(config, pairs, **WAYS[way]))
    assert [(str(verdict), verdict.cause) for verdict in verdicts if not verdict.passed] == []


def test_pairs():
    """A single layout is resumed in itself and in the next."""
    assert [f"{a}:{b}" for a, b in pairs_of(["tp2", "pp2", "dp2:cp2"])] == [
        "tp2:tp2", "tp2:pp2", "pp2:pp2", "pp2:tp2", "dp2:cp2",
    ]  # fmt: skip
    assert pairs_of(["tp2"]) == [(Layout(tp=2), Layout(tp=2))]


def test_flags_that_do_not_fit():
    with pytest.raises(UserError, match=r"^--dtype and --offload-optimizer need --resume$"):
        tool.main(["--model", "gpt2", "--dtype", "bfloat16"])
    with pytest.raises(UserError, match=r"^--resume needs a list of --layouts, not all"):
        tool.main(["--model", "gpt2", "--resume", "--layouts", "all"])
    flags = "--shrink --resume --optimizer muon --offload-optimizer --layouts tp2"
    with pytest.raises(UserError, match=r"^the state of muon can't be offloaded"):
        tool.main(["--model", "gpt2", *flags.split()])
