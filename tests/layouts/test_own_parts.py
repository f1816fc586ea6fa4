"""Parts that a user adds from outside of the package: parameters that rest as ranges over the
replicas."""

from dataclasses import replace

import pytest
import torch

import megazoo
from tests.support.layouts import MODELS
from tests.support.own_storage import gathered_parameters, rest_as_ranges
from tests.support.training import (
    context,
    make_batch,
    replica_rows,
    tiny_config,
)

LLAMA = replace(MODELS["llama"], layers=2, tie_embeddings=False)


def trained_as_ranges(config, ranges, layout):
    """Train two steps of one micro-batch; return the losses and the weights."""
    ctx = context(**layout, folded={"ranges": layout["dp"]} if ranges else None)
    model = megazoo.from_config(config, ctx, seed=3)
    model = rest_as_ranges(model) if ranges else model
    optimizer, found = megazoo.optim.AdamW(model, lr=1e-2, weight_decay=0.0, clip_grad=0.0), []
    for step in range(2):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        found.append(model.train_batch(ids, targets=targets).item())
        optimizer.step()
    resting = sum(parameter.numel() for parameter in model.parameters())
    weights = gathered_parameters(model)
    return found, weights, resting


@pytest.mark.parametrize("config", [LLAMA, tiny_config(tied=False)], ids=["llama", "gpt2"])
def test_parameters_that_rest_as_ranges_train_bit_for_bit_as_whole_ones(ranks, config):
    plain = ranks(trained_as_ranges, 2, config, False, {"dp": 2})
    of_ranges = ranks(trained_as_ranges, 2, config, True, {"dp": 2})
    for (losses, weights, whole), (found, gathered, resting) in zip(plain, of_ranges, strict=True):
        assert found == losses
        assert resting <= whole / 2 + len(weights)
        for name, weight in weights.items():
            assert torch.equal(gathered[name], weight), name
