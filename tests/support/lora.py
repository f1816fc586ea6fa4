"""A training run of adapters in any layout, and its comparison with one process."""

from functools import cache

import torch

import megazoo
from megazoo.parallel.storage import in_memory
from tests.support.training import (
    context,
    make_batch,
    randomize,
    replica_rows,
)


def run_step(model, by, step, schedule):
    """Forward and backward of a step's batch, as `by` says; returns the loss."""
    ids, targets = (replica_rows(tensor, model.ctx) for tensor in make_batch(step))
    count = min(4, len(ids))
    if by == "own loop":
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        model.sync_gradients()
        return loss
    if by == "microbatches":
        outputs = model.microbatches(ids, targets=targets, num_microbatches=count)
        return sum([(out.loss.backward(), out.loss.detach())[1] for out in outputs])
    batch = {"num_microbatches": count, "schedule": schedule, "step": step}
    return model.train_batch(ids, targets=targets, **batch)


def train(
    config, layout, targets="all-linear", schedule="1f1b", dropout=0.0, recompute=("none",),
    steps=20, by="train_batch", trained="", dtype=torch.float32, compiled=False, **how
):  # fmt: skip
    """Losses and norms of every step; the trained parameters' values by box, and whether the rest
    is as it was."""
    ctx = context(**layout)
    model = randomize(megazoo.from_config(config, ctx, seed=3, dtype=dtype)).recompute(*recompute)
    before = {e.name: e.parameter.detach().clone() for e in in_memory(model, model.entries())}
    megazoo.lora.add(model, rank=3, alpha=6, targets=targets, dropout=dropout)
    if trained:
        model.train_only(trained)
    if compiled:
        model.compile()
    # with a small epsilon, gradients that are nothing but rounding make steps as large as any
    opt = megazoo.optim.AdamW(model, lr=1e-2, eps=1e-4, clip_grad=0.2, **how)
    history = []
    for step in range(steps):
        loss = run_step(model, by, step, schedule)
        history.append((loss.item(), opt.step().item()))
    values, same = {}, True
    for entry in in_memory(model, model.entries()):
        assert entry.parameter.requires_grad == (entry.name in opt.state)
        if entry.parameter.requires_grad:
            pieces = entry.spec.pieces(ctx.place)
            parts = [(p.box, entry.parameter.detach()[p.index()].clone()) for p in pieces]
            values[entry.name] = parts
        else:
            assert entry.parameter.grad is None
            same = same and torch.equal(entry.parameter, before[entry.name])
    return history, values, same


@cache
def one_process(config, **how):
    return train(config, {}, **how)


def indices(box) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in box)


def assembled(pieces) -> torch.Tensor:
    """The tensor of which the pieces are all boxes."""
    values = torch.full(
        [
            max(stop for _, stop in bounds)
            for bounds in zip(*(box for box, _ in pieces), strict=True)
        ],
        torch.nan,
    )
    for box, part in pieces:
        values[indices(box)] = part
    return values


def assert_alike(found, expected, tolerance=1e-5):
    """Losses, norms and values of all ranks are those of one process, and no value is missing."""
    history, whole, _ = expected
    seen = set()
    for ours, values, same in found:
        assert same
        losses, norms = torch.tensor(ours).sub(torch.tensor(history)).abs().T
        assert losses.max() < tolerance
        assert (norms / torch.tensor(history)[:, 1]).max() < 10 * tolerance
        for parameter, pieces in values.items():
            seen.add(parameter)
            for box, part in pieces:
                there = assembled(whole[parameter])[indices(box)]
                assert (part - there).abs().max() < tolerance, parameter
    assert seen == set(whole)
    assert any(values.any() for name in whole if name.endswith("B") for _, values in whole[name])
