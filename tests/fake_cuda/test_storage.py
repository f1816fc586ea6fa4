"""Copies between host and device while a model is built, saved and loaded, on fake CUDA: none of
pageable memory, and no wait for one tensor, or one tile, at a time."""

from collections import Counter
from pathlib import Path

import pytest
import torch

import megazoo
from megazoo.checkpoint import Checkpoint, load, save, saving
from megazoo.models.registry import find_config
from megazoo.parallel.staging import BUFFER_BYTES
from tests.support.fakecuda import WHY_NOT, in_own_process

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))

SIZES = {"hidden_size": 1024, "heads": 8, "kv_heads": 8, "ffn_size": 3584, "layers": 1}


def building(dtype: torch.dtype, **sizes):
    """Build a rank of tp 2; returns what was seen, and the bytes of each parameter."""
    from tests.support.fakecuda.measure import build, context, seen, watched

    with watched():
        model = build("llama-tiny", context(tp=2), dtype, initialized=True, **sizes)
        return seen(), [parameter.nbytes for parameter in model.parameters()]


def test_initial_values_come_in_bands():
    noted, sizes = in_own_process(building, torch.bfloat16, **SIZES)
    # A weight of several fused parts comes part by part: q, k and v.
    bands = sum(-(-size // BUFFER_BYTES) for size in sizes) + 3 * SIZES["layers"]
    copies = of_file(noted.launches_of, "parallel/staging.py")
    assert len(sizes) // 2 < copies <= bands
    assert not [what for what in noted.syncs if "copy" in what]
    assert noted.syncs.total() <= copies


def copying(dtype: torch.dtype, **sizes):
    """Copy a step as a save in the background does, twice; returns what was seen of the copies."""
    from tests.support.fakecuda.measure import AdamW, build, context, seen, watched

    with watched():
        model = build("llama-tiny", context(tp=2), dtype, **sizes)
        optimizer, copies, noted = AdamW(model), saving.Copies(), []
        for step in range(2):
            contents = saving._contents_of_step(step, model, optimizer, {})
            seen()
            copies.forget()
            contents.copied(copies)
            noted.append(seen())
        return noted


def test_a_step_that_is_saved_in_the_background_is_waited_for_once():
    for noted in in_own_process(copying, torch.bfloat16, **SIZES):
        assert noted.syncs.total() == 1
        assert of_file(noted.launches_of, "checkpoint/copies.py") >= 4 * 2 * SIZES["layers"]


def loading(path: Path):
    """Load a checkpoint; returns what was seen."""
    from tests.support.fakecuda.measure import AdamW, build, context, seen, watched

    with watched():
        model = build("llama-tiny", context(tp=2), torch.float32)
        optimizer, checkpoint = AdamW(model), Checkpoint(path, verify=False)
        # A file can't be read into a fake tensor.
        checkpoint.files.box = lambda file, name, shape, box: torch.empty([b - a for a, b in box])
        seen()
        load(checkpoint, model, optimizer)
        return seen()


def test_nothing_is_loaded_through_pageable_memory(tmp_path):
    model = megazoo.from_config(find_config("llama-tiny"), seed=3)
    save(tmp_path, 1, model, megazoo.optim.AdamW(model))
    noted = in_own_process(loading, tmp_path)
    assert of_file(noted.launches_of, "parallel/staging.py") >= 3 * len(list(model.parameters()))
    assert not [what for what in noted.syncs if "copy" in what]


def of_file(launches: Counter, file: str) -> int:
    return sum(count for line, count in launches.items() if line.startswith(file))
