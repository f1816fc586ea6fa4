"""Frozen parameters stay as they are to the bit, and the others train as torch would train them, in
every layout."""

import re
from functools import cache
from unittest import mock

import pytest
import torch

import megazoo
from megazoo.checkpoint import Checkpoint, load, save
from megazoo.errors import UserError
from megazoo.models.freezing import names_matching
from megazoo.parallel import failure
from tests.support.sampling import pairs_covered, sampled
from tests.support.training import (
    MODELS,
    context,
    layout_name,
    make_batch,
    randomize,
    replica_rows,
    run_in_layout,
    tiny_config,
    world,
)

CONFIGS = {
    "gpt2, tied": MODELS["gpt2"],
    "gpt2": tiny_config(tied=False),
    "llama": MODELS["llama, one KV head"],
    "mpt": MODELS["mpt"],
}
# What trains, as regular expressions of names; of five layers at pp 2 the first stage has two.
TRAINED = {
    "embedding frozen": r"^(?!embedding)",
    "first stage frozen": r"layers\.[2-4]\.|norm\.|head",
    "norms and biases alone": r"norm|bias",
    "last layer and head": r"layers\.4\.|^norm|^head",
}
LAYOUTS = [
    dict(),
    dict(tp=2),
    dict(tp=2, sp=True),
    dict(dp=2),
    dict(pp=2, stage_layers=(2, 3)),
    dict(tp=2, pp=2),
    dict(pp=2, dp=2),
    dict(pp=2, v=2),
]
HOW = {
    "plain": {},
    "zero": {"zero": 1},
    "offload": {"offload": True},
    "recompute": {"recompute": ("full", 2)},
    "selective": {"recompute": ("selective",)},
    "zb-h1": {"schedule": "zb-h1"},
    "gpipe": {"schedule": "gpipe"},
}


def possible(name, trained, layout, how):
    pipeline, replicas = layout.get("pp", 1) > 1, layout.get("dp", 1) > 1
    if how in ("zb-h1", "gpipe") and (not pipeline or (how == "zb-h1" and "v" in layout)):
        return False
    return how != "zero" or replicas


def freeze(model, trained: str) -> None:
    for entry in model.entries():
        entry.parameter.requires_grad_(bool(re.search(trained, entry.name)))


def train(
    config, trained, layout, schedule="1f1b", recompute=("none",), steps=2, one_side=False, **how
):
    """Parameters of this rank with their boxes, and the norms; sees that what is frozen stays out
    of everything."""
    ctx = context(**layout)
    model = randomize(megazoo.from_config(config, ctx, seed=3)).recompute(*recompute)
    if one_side:  # of the embedding, which is tied
        model.embedding.weight.requires_grad_(ctx.pp_rank != 0)
    else:
        freeze(model, trained)
    optimizer = megazoo.optim.AdamW(model, lr=1e-2, eps=1e-4, clip_grad=0.2, **how)
    before = {entry.name: entry.parameter.detach().clone() for entry in model.entries()}
    norms = []
    for step in range(steps):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        model.train_batch(ids, targets=targets, num_microbatches=2, schedule=schedule, step=step)
        norms.append(optimizer.step().item())
    parts = {}
    for entry in model.entries():
        frozen = not re.search(trained, entry.name)
        assert entry.parameter.requires_grad != frozen
        if frozen:
            assert torch.equal(entry.parameter, before[entry.name]), entry.name
            assert entry.parameter.grad is None, entry.name
        assert (entry.name in optimizer.state) != frozen
        assert (entry.parameter in model.engine.gradients.buckets.place) != frozen
        pieces = entry.spec.pieces(ctx.place)
        parts[entry.name] = [
            (piece.box, entry.parameter.detach()[piece.index()]) for piece in pieces
        ]
    return parts, norms


@cache
def by_torch(config, trained, steps=2):
    """The same with torch's autograd, clipping and AdamW, in one process."""
    model = randomize(megazoo.from_config(config, seed=3))
    freeze(model, trained)
    learns = [entry.parameter for entry in model.entries() if entry.parameter.requires_grad]
    groups = [
        {"params": [p for p in learns if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in learns if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer, norms = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-4), []
    for step in range(steps):
        ids, targets = make_batch(step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            model(ids).logits.flatten(0, 1), targets.flatten()
        ).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(learns, 0.2).item())
        optimizer.step()
    return {entry.name: entry.parameter.detach() for entry in model.entries()}, norms


def name_of(part) -> str:
    return layout_name(part) if isinstance(part, dict) else part


CASES = pairs_covered(list(CONFIGS), list(TRAINED), LAYOUTS, list(HOW), possible=possible)


DRAWN = sampled(CASES, 9, seed=673)
for number, values in enumerate((CONFIGS, TRAINED, LAYOUTS, HOW)):
    drawn = [case.values[number] for case in DRAWN if not case.marks]
    assert all(value in drawn for value in values), f"not all of {list(values)} are fast: {drawn}"


@pytest.mark.parametrize(("name", "trained", "layout", "how"), DRAWN, ids=name_of)
def test_what_is_frozen_stays_and_the_rest_trains_as_torch_does_it(
    ranks, name, trained, layout, how
):
    expected, norms = by_torch(CONFIGS[name], TRAINED[trained])
    for answer in run_in_layout(ranks, train, layout, CONFIGS[name], TRAINED[trained], **HOW[how]):
        assert_trained_as(answer, expected, norms)


def assert_trained_as(answer, expected: dict, norms: list):
    parts, found = answer
    torch.testing.assert_close(found, norms, rtol=1e-4, atol=0)
    for entry, pieces in parts.items():
        for box, part in pieces:
            whole = expected[entry][tuple(slice(*bounds) for bounds in box)]
            torch.testing.assert_close(part, whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "zb-h1"])
def test_a_tied_parameter_frozen_on_one_side_is_frozen_on_both(ranks, schedule):
    how = MODELS["gpt2"], TRAINED["embedding frozen"]
    expected = by_torch(*how)
    for answer in ranks(train, 2, *how, dict(pp=2), schedule, one_side=True):
        assert_trained_as(answer, *expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_frozen_weights_of_lower_precision_stay(dtype):
    model = megazoo.from_config(tiny_config(), dtype=dtype, seed=3).train_only("norm")
    optimizer = megazoo.optim.AdamW(model, lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids, targets = make_batch(0)
    for step in range(2):
        model.train_batch(ids, targets=targets, step=step)
        optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all("norm" in name for name in changed)


def resumed(path, layout_before, layout):
    """Four steps, and two that go on from a checkpoint after two: in another layout, with the same
    frozen."""
    ctx = context(**layout)
    model = megazoo.from_config(tiny_config(), ctx, seed=3).train_only("norm|bias")
    optimizer = megazoo.optim.AdamW(model, lr=1e-2)
    first = 0
    if layout_before is not None:
        load(Checkpoint(path), model, optimizer)
        first = 2
    for step in range(first, 4):
        if step == 2 and layout_before is None:
            save(path, 2, model, optimizer)
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        model.train_batch(ids, targets=targets, num_microbatches=2, step=step)
        norm = optimizer.step().item()
    return norm


@pytest.mark.parametrize(
    "layout",
    [dict(pp=2), *(pytest.param({axis: 2}, marks=pytest.mark.slow) for axis in ("tp", "dp"))],
    ids=layout_name,
)
def test_a_run_with_frozen_parameters_goes_on_in_any_layout(ranks, tmp_path, layout):
    norms = ranks(resumed, world(layout), tmp_path, None, layout)
    assert resumed(tmp_path, layout, {}) == pytest.approx(norms[0], rel=1e-4)
    assert not any(
        "embedding" in name and "exp_avg" in name for name in Checkpoint(tmp_path).tensors
    )


def test_a_checkpoint_without_what_is_trained_now_says_so(tmp_path):
    """Of a parameter that was frozen then, or without an optimizer."""
    model = megazoo.from_config("gpt2-tiny").train_only("norm")
    other = megazoo.from_config("gpt2-tiny")
    save(tmp_path / "frozen", 1, model, megazoo.optim.AdamW(model))
    other.save_parallelized(tmp_path / "weights")
    for path, told in {
        "frozen": r"has no optimizer state of embedding\.weight, which was frozen",
        "weights": "has no optimizer state: load only its weights",
    }.items():
        with pytest.raises(UserError, match=told):
            load(Checkpoint(tmp_path / path), other, megazoo.optim.AdamW(other))


def test_a_second_optimizer_trains_what_was_unfrozen():
    model = megazoo.from_config(tiny_config(), seed=3).train_only("norm")
    ids, targets = make_batch(0)
    first = megazoo.optim.AdamW(model)
    model.train_batch(ids, targets=targets)
    first.step()
    model.requires_grad_(True)
    model.train_batch(ids, targets=targets)
    assert model.embedding.weight.grad is not None
    with pytest.raises(
        UserError, match="frozen or unfrozen after AdamW was created: create a new one"
    ):
        first.step()
    before = model.embedding.weight.detach().clone()
    megazoo.optim.AdamW(model).step()
    assert not torch.equal(model.embedding.weight, before)


def test_what_is_frozen_later_loses_its_gradient():
    """Else an optimizer of torch would go on stepping it."""
    model = megazoo.from_config(tiny_config(), seed=3)
    ids, targets = make_batch(0)
    model.train_batch(ids, targets=targets)
    model.norm.requires_grad_(False)
    model.train_batch(ids, targets=targets)
    assert model.norm.weight.grad is None
    assert model.embedding.weight.grad is not None


def tie_unfrozen(on_both: bool):
    """What is said where the ranks unfreeze a tie without a word, one of them or both; and its
    gradient after they agreed."""
    model = megazoo.from_config(tiny_config(), context(pp=2), seed=3)
    model.embedding.requires_grad_(False)
    ids, targets = make_batch(0)
    model.train_batch(ids, targets=targets)
    model.embedding.requires_grad_(on_both or model.ctx.pp_rank == 0)
    with pytest.raises(UserError) as caught, mock.patch.object(failure, "PATIENCE", 0.3):
        model.train_batch(ids, targets=targets)
    if not on_both:
        torch.distributed.destroy_process_group()
        return str(caught.value), None
    model.engine.agree_on_frozen()
    model.train_batch(ids, targets=targets)
    return str(caught.value), model.embedding.weight.grad


TIE_CHANGED = "a tied parameter was frozen or unfrozen after training began"


def test_a_tie_is_not_unfrozen_on_one_side(ranks):
    (first, _), (last, _) = ranks(tie_unfrozen, 2, False)
    assert first.startswith(TIE_CHANGED)
    assert last == f"rank 0 failed: {first}"


def test_a_tie_is_unfrozen_where_all_ranks_agree(ranks):
    (first, a), (last, b) = ranks(tie_unfrozen, 2, True)
    assert first.startswith(TIE_CHANGED)
    assert last.startswith(TIE_CHANGED)
    assert torch.equal(a, b)
    assert a.any()


def test_freezing_by_name():
    model = megazoo.from_config("gpt2-tiny").freeze("embedding").freeze("layers[.]0[.]")
    names = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, trained in names.items():
        assert trained == (not re.search(r"embedding|layers\.0\.", name)), name
    norms = ["layers.1.norm.weight", "layers.10.norm.weight"]
    names = ["head.weight", *norms, "layers.10.mlp.up.bias"]
    assert names_matching("head|bias", names) == {names[0], names[3]}
    assert names_matching(r"layers\.1\.", names) == {names[1]}
    assert names_matching("*norm*", names) == set(norms)
    kinds = r"head\.weight, layers\.0\.norm\.weight, layers\.0\.mlp"
    with pytest.raises(UserError, match=f"'nrm' matches no parameter; there are {kinds}"):
        names_matching("nrm", names)


def test_nothing_to_train_is_refused():
    model = megazoo.from_config("gpt2-tiny").requires_grad_(False)
    with pytest.raises(UserError, match="every parameter is frozen"):
        megazoo.optim.AdamW(model)
