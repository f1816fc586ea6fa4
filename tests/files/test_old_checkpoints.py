"""Checkpoints of an earlier version load in other layouts, and training resumes from them."""

import json

import pytest
import torch

from megazoo.errors import UserError
from megazoo.testing import RankError
from tests.support.old_checkpoints import DIRECTORY, LAYOUTS, steps
from tests.support.training import run_in_layout, worst_relative

# torch draws the same normal values with these instructions only. The base of the adapters was
# drawn from a seed.
SAME_BASE = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind, (_, *others) in LAYOUTS.items() for layout in others],
)
def test_training_resumes_from_an_old_checkpoint(ranks, kind, layout):
    expected = json.loads((DIRECTORY / kind / "steps.json").read_text())
    start = DIRECTORY / kind / "checkpoint"
    if kind == "lora" and not SAME_BASE:
        with pytest.raises((UserError, RankError), match="belong to another base"):
            run_in_layout(ranks, steps, layout, kind, start=start)
        return
    for history in run_in_layout(ranks, steps, layout, kind, start=start):
        assert worst_relative(history, expected) < 1e-5
