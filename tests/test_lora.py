"""Adapters train alike in every layout, and leave the weights beside them as they were."""

import random
from functools import cache, partial

import pytest
import torch
from helpers import (
    MODELS,
    context,
    layout_name,
    make_batch,
    pairs_covered,
    randomize,
    replica_rows,
    run_in_layout,
    tiny_config,
)

import megazoo

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


def run_step(model, by, step, schedule):
    """Forward and backward of a step's batch, as `by` says; returns the loss."""
    ids, targets = (replica_rows(tensor, model.ctx) for tensor in make_batch(step))
    if by == "own loop":
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        model.sync_gradients()
        return loss
    if by == "microbatches":
        outputs = model.microbatches(ids, targets=targets, num_microbatches=4)
        return sum([(out.loss.backward(), out.loss.detach())[1] for out in outputs])
    return model.train_batch(ids, targets=targets, num_microbatches=4, schedule=schedule, step=step)


def train(
    config, layout, targets="all-linear", schedule="1f1b", dropout=0.0, recompute=("none",),
    steps=20, by="train_batch", trained="", dtype=torch.float32, compiled=False, **how
):  # fmt: skip
    """Losses and norms of every step; the trained parameters' values by box, and whether the rest
    is as it was."""
    ctx = context(**layout)
    model = randomize(megazoo.from_config(config, ctx, seed=3, dtype=dtype)).recompute(*recompute)
    before = {e.name: e.parameter.detach().clone() for e in model.entries()}
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
    for entry in model.entries():
        assert entry.parameter.requires_grad == (entry.name in opt.state)
        if entry.parameter.requires_grad:
            pieces = entry.spec.pieces(ctx.tp_size, ctx.tp_rank)
            parts = [(p.box, entry.parameter.detach()[p.index()].clone()) for p in pieces]
            values[entry.name] = parts
        else:
            assert entry.parameter.grad is None
            same = same and torch.equal(entry.parameter, before[entry.name])
    return history, values, same


@cache
def one_process(config, **how):
    return train(config, {}, **how)


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
                there = torch.cat([rows for _, rows in whole[parameter]])
                there = there[tuple(slice(*bounds) for bounds in box)]
                assert (part - there).abs().max() < tolerance, parameter
    assert seen == set(whole)
    assert any(values.any() for name in whole if name.endswith("B") for _, values in whole[name])


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
