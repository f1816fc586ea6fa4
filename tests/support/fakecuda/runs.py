"""Runs on the fake device that several tests watch."""

import math

import pytest
import torch

from tests.support.fakecuda import measure


def on_rank(which: str, options: dict) -> dict:
    """Put the options on the first rank of their layout, or on its last."""
    layout = options.get("layout", {})
    ranks = math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))
    return {**options, "layout": {**layout, "rank": ranks - 1 if which == "last" else 0}}


def train_twice(preset: str, **options):
    """What is seen of a second batch: what is made once and kept is there by then. The batch's
    boundaries, of values that fake tensors lack, are three for each micro-batch."""
    from megazoo.engine import batch

    real = batch._boundaries

    def boundaries(segments, padding, count):
        if segments is None or segments.is_cuda:
            return real(segments, padding, count)
        return torch.zeros(3 * count, dtype=torch.int32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "_boundaries", boundaries)
        return measure.training(preset, microbatches=2, batches=2, **options)[0]
