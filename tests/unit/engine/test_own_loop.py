"""Loops and optimizers of a user's own: gradients that are summed are right, and those that nobody
summed refused."""

import copy
import pickle
from functools import cache
from itertools import product

import pytest
import torch

import megazoo
from megazoo.engine.microbatch import MicroBatch
from megazoo.errors import UserError
from megazoo.optim.adamw import AdamW
from megazoo.optim.clip import clip_grad_norm
from megazoo.testing.ranks import RankError
from tests.support.sampling import marked_slow
from tests.support.training import (
    MODELS,
    context,
    layout_name,
    make_batch,
    randomize,
    replica_rows,
    run_in_layout,
    tiny_config,
    worst_gradient,
)

FORGOTTEN = (
    r"not summed over the ranks: call model.sync_gradients\(\) on every rank before the step"
)


def pieces_of_gradients(model) -> dict:
    return {
        entry.name: [
            (piece.box, entry.parameter.grad[piece.index()].clone())
            for piece in entry.spec.pieces(model.ctx.place)
        ]
        for entry in model.entries()
    }


def small(ctx=None, **how):
    return randomize(megazoo.from_config(tiny_config(layers=2), ctx, seed=3, **how))


def parameters_after(optimizer_of, layout, steps=2, sync=True):
    """A user's loop, `model(...).loss.backward()`: gradients of the last step, and this rank's
    parameters."""
    ctx = context(**layout)
    model = small(ctx)
    optimizer = optimizer_of(model)
    for step in range(steps):
        ids, _ = make_batch(step)
        optimizer.zero_grad()
        for half in replica_rows(ids, ctx).chunk(2):  # two backwards, added up
            (model(half, labels=half).loss / 2).backward()
        if sync:
            model.sync_gradients()
        gradients = pieces_of_gradients(model)  # which the step clips
        optimizer.step()
    return gradients, {entry.name: entry.parameter.detach() for entry in model.entries()}


def ours(model, **how):
    return AdamW(model, lr=1e-2, eps=1e-4, clip_grad=0.2, **how)


def sharded(model):
    return ours(model, zero=1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


LAYOUTS = [dict(dp=2), dict(tp=2), dict(tp=2, sp=True), dict(tp=2, dp=2, sp=True)]
CASES = list(product([ours, sharded, sgd], LAYOUTS))
FAST = 0, 3, 4, 6, 9  # each optimizer and each layout


@pytest.mark.parametrize(
    ("optimizer_of", "layout"),
    marked_slow(CASES, lambda number, _: number not in FAST),
    ids=lambda part: layout_name(part) if isinstance(part, dict) else part.__name__,
)
def test_a_loop_of_ones_own_trains_like_one_process(ranks, layout, optimizer_of):
    # All rows have as many labels, so that the mean over the replicas is the mean over the batch.
    expected, parameters = parameters_after(optimizer_of, {})
    answers = run_in_layout(ranks, parameters_after, layout, optimizer_of)
    assert worst_gradient([gradients for gradients, _ in answers], expected)[0] < 1e-3
    for _, found in answers:
        for name, parameter in found.items():
            if parameter.shape == parameters[name].shape:
                torch.testing.assert_close(parameter, parameters[name], atol=2e-5, rtol=1e-4)


def test_a_step_with_gradients_that_nobody_summed_is_refused(ranks):
    ranks(refused, 2)


def refused():
    for optimizer_of in (ours, sharded, sgd):
        with pytest.raises(UserError, match=FORGOTTEN):
            parameters_after(optimizer_of, dict(dp=2), sync=False)


def after_a_batch_some_get_no_gradient():
    ctx = context(dp=2)
    model, (ids, targets) = small(ctx), (replica_rows(tensor, ctx) for tensor in make_batch(0))
    model.train_batch(ids, targets=targets)
    model.zero_grad()
    (model.norm.weight.sum() * (1 + 2 * ctx.dp_rank)).backward()
    model.sync_gradients()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert (grads.pop("norm.weight") == 2).all()  # the mean of 1 and 3
    assert not any(grad.any() for grad in grads.values())


def test_parameters_without_a_gradient_count_as_zero_after_a_batch(ranks):
    ranks(after_a_batch_some_get_no_gradient, 2)


def test_copies_over_tp_need_no_more_than_the_backward(ranks):
    expected, _ = parameters_after(ours, {}, steps=1)
    answers = ranks(parameters_after, 2, ours, dict(tp=2, sp=True), steps=1, sync=False)
    assert worst_gradient([gradients for gradients, _ in answers], expected)[0] < 1e-3


def synced_after_train_batch():
    ctx = context(dp=2)
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    for zero in (0, 1):
        model = small(ctx)
        optimizer = AdamW(model, zero=zero)
        model.train_batch(ids, targets=targets)
        before = [p.grad.clone() for p in model.parameters()]
        model.sync_gradients()
        for gradient, p in zip(before, model.parameters(), strict=True):
            assert torch.equal(gradient, p.grad)
        optimizer.step()


def test_after_train_batch_nothing_is_left_to_sum(ranks):
    ranks(synced_after_train_batch, 2)


def left_in_the_middle():
    ctx = context(pp=2)
    model = megazoo.from_config(tiny_config(), ctx)
    optimizer = AdamW(model)
    ids, _ = make_batch(0)
    for out in model.microbatches(ids, labels=ids, num_microbatches=2):
        out.loss.backward()
        break
    for act in (optimizer.step, model.sync_gradients, lambda: clip_grad_norm(model, 1.0)):
        with pytest.raises(UserError, match=r"run the loop over model.microbatches\(\) to its end"):
            act()
    for out in model.microbatches(ids, labels=ids, num_microbatches=2):
        out.loss.backward()
    optimizer.step()


def test_a_loop_over_micro_batches_that_was_left_is_refused(ranks):
    ranks(left_in_the_middle, 2)


def own_pipeline():
    """Two stages by hand, with a tied embedding: gradients after sync_gradients."""
    import torch.distributed as dist

    model = randomize(megazoo.from_config(MODELS["llama"], context(pp=2), seed=3))
    ids, targets = make_batch(0)
    targets = torch.where(targets == -100, 0, targets)
    batch, (stage,) = MicroBatch(tuple(ids.shape), ids, targets), model.stages
    optimizer = AdamW(model)
    if stage.first:
        x = model.forward_stage(ids, batch, stage)
        dist.send(x.detach(), 1)
        gradient = torch.empty_like(x)
        dist.recv(gradient, 1)
        x.backward(gradient)
    else:
        x = torch.empty(*ids.shape, 32)
        dist.recv(x, 0)
        x.requires_grad_()
        model.output_head.token_losses(
            model.output_head.outputs(model.forward_stage(x, batch, stage), batch), batch
        ).mean().backward()
        dist.send(x.grad, 0)
    with pytest.raises(UserError, match=FORGOTTEN):
        optimizer.step()
    model.sync_gradients()
    norm = optimizer.step()
    return norm, model.embedding.weight.detach()


def test_ties_of_an_own_pipeline_are_summed(ranks):
    model = randomize(megazoo.from_config(MODELS["llama"], seed=3))
    optimizer = AdamW(model)
    ids, targets = make_batch(0)
    model.train_batch(ids, targets=torch.where(targets == -100, 0, targets))
    norm = optimizer.step()
    (norm_0, first), (norm_1, last) = ranks(own_pipeline, 2)
    torch.testing.assert_close([norm_0, norm_1], [norm, norm])
    assert torch.equal(first, last)


def clipped(name, frozen, layout, zero=0):
    ctx = context(**layout)
    model = randomize(megazoo.from_config(MODELS[name], ctx, seed=3))
    if frozen:
        model.train_only("norm|mlp")
    if zero:
        AdamW(model, zero=zero)
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    model.train_batch(ids, targets=targets, num_microbatches=2)
    return [clip_grad_norm(model, most).item() for most in (0.05, 1e9)]


@cache
def norm_by_torch(name, frozen):
    model = randomize(megazoo.from_config(MODELS[name], seed=3))
    if frozen:
        model.train_only("norm|mlp")
    ids, targets = make_batch(0)
    logits = model(ids).logits.flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, targets.flatten()).backward()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()


ONE_HEAD = "llama, one KV head"  # of which there are copies
CLIPPED = [
    *product(
        ["gpt2", "llama"],  # both tied
        [False, True],
        [dict(), dict(tp=2), dict(pp=2), dict(tp=2, pp=2, sp=True), dict(dp=2)],
        [0],
    ),
    (ONE_HEAD, False, dict(tp=2, dp=2), 1),
    (ONE_HEAD, False, dict(dp=2, pp=2), 2),
    (ONE_HEAD, False, dict(tp=4), 0),
]


@pytest.mark.parametrize(
    ("name", "frozen", "layout", "zero"),
    marked_slow(CLIPPED, lambda number, case: number % 3 and case[0] != ONE_HEAD),
    ids=str,
)
def test_clip_grad_norm_is_of_the_whole_model(ranks, name, frozen, layout, zero):
    expected = pytest.approx([norm_by_torch(name, frozen), 0.05], rel=1e-4)
    for norms in run_in_layout(ranks, clipped, layout, name, frozen, zero=zero):
        assert norms == expected


def test_small_gradients_are_not_clipped():
    model, (ids, targets) = small(), make_batch(0)
    model.train_batch(ids, targets=targets)
    before = [p.grad.clone() for p in model.parameters()]
    clip_grad_norm(model, 1e3)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))


def batch_of(ctx):
    return replica_rows(make_batch(0)[0], ctx)


def own_forward(of_a_copy: bool):
    """Nothing of megazoo is made but the model; or a deep copy, which has buckets of its own."""
    ctx = context(dp=2)
    model, ids = small(ctx), batch_of(ctx)
    if of_a_copy:
        model.train_batch(ids, labels=ids)
        model = copy.deepcopy(model)
        model.zero_grad()
    batch = MicroBatch(tuple(ids.shape), ids, ids)
    x = model.forward_stage(ids, batch, model.stages[0])  # Model.forward is not called
    (model.output_head.loss(x, batch) / ids.numel()).backward()
    if not of_a_copy:
        with pytest.raises(UserError, match=FORGOTTEN):
            sgd(model).step()
    model.sync_gradients()
    sgd(model).step()
    return next(model.parameters()).detach()


@pytest.mark.parametrize("of_a_copy", [False, True])
def test_gradients_of_an_own_forward_are_summed(ranks, of_a_copy):
    a, b = ranks(own_forward, 2, of_a_copy)
    assert torch.equal(a, b)


def zeros_mixed():
    ctx = context(dp=2)
    model, ids = small(ctx), batch_of(ctx)
    shares = AdamW(model, zero=1)
    model.train_batch(ids, labels=ids)
    with pytest.raises(UserError, match=r"sharded over the replicas because of AdamW\(zero=1\)"):
        sgd(model).step()
    model(ids, labels=ids).loss.backward()
    for act in (shares.step, model.sync_gradients):
        with pytest.raises(
            UserError,
            match=r"has added to gradients that train_batch sharded .* call model.zero_grad\(\)",
        ):
            act()
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    model.sync_gradients()
    shares.step()
    AdamW(model)
    model.train_batch(ids, labels=ids)
    with pytest.raises(
        UserError, match="another AdamW was created for this model, with another zero"
    ):
        shares.step()


def test_shares_and_sums_of_gradients_are_not_mixed(ranks):
    ranks(zeros_mixed, 2)


def test_a_backward_before_the_optimizer_is_made_counts():
    """In bfloat16 its gradients are fp32 from the start."""
    model, (ids, _) = small(dtype=torch.bfloat16), make_batch(0)
    model(ids, labels=ids).loss.backward()
    gradient = model.norm.weight.grad
    optimizer = AdamW(model)
    assert gradient.dtype == torch.float32
    assert model.norm.weight.grad is gradient
    optimizer.step()


def test_after_a_batch_that_failed_another_is_trained_on():
    model, (ids, _) = small(), make_batch(0)
    optimizer = AdamW(model)

    def fail(*_):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        model.train_batch(ids, labels=ids, loss_fn=fail)
    with pytest.raises(UserError, match="a batch is not finished"):
        optimizer.step()
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError, match="mine"):
        model.train_batch(ids, labels=ids, loss_fn=fail)
    model.train_batch(ids, labels=ids)
    optimizer.step()


def frozen_for_a_moment():
    ctx = context(dp=2)
    model, ids = small(ctx), batch_of(ctx)
    optimizer = AdamW(model)
    model.train_batch(ids, labels=ids)
    before = model.norm.weight.grad.clone()
    model.requires_grad_(False)
    model(ids, labels=ids)
    model.requires_grad_(True)
    assert torch.equal(model.norm.weight.grad, before)
    optimizer.step()


def test_a_model_that_is_frozen_for_a_moment_trains_on(ranks):
    ranks(frozen_for_a_moment, 2)


def test_a_loss_without_a_gradient_is_refused():
    model, (ids, _) = small(), make_batch(0)
    with pytest.raises(UserError, match="loss_fn returns a number without a gradient"):
        model.train_batch(ids, labels=ids, loss_fn=lambda logits, labels: logits.detach().mean())


def gradients_of_one_replica(layout) -> dict:
    """Only the first replica has rows, and runs backward; all call sync_gradients."""
    ctx = context(**layout)
    model, ids = small(ctx), make_batch(0)[0]
    megazoo.optim.AdamW(model)
    if ctx.dp_rank == 0:
        (model(ids, labels=ids).loss * ctx.dp_size).backward()
    model.sync_gradients()
    return pieces_of_gradients(model)


def test_a_replica_without_a_backward_takes_part(ranks):
    """The mean over the replicas counts its gradient as zero."""
    expected = gradients_of_one_replica({})
    distance, name = worst_gradient(ranks(gradients_of_one_replica, 2, dict(dp=2)), expected)
    assert distance < 1e-5, name


def norm_after_freezing(layout, sync) -> float:
    ctx = context(**layout)
    model, ids = small(ctx), replica_rows(make_batch(0)[0], ctx)
    model.engine.parameters_changed()  # makes the buckets, which see the backward
    model(ids, labels=ids).loss.backward()
    model.freeze(r"layers\.0")
    if sync:
        model.sync_gradients()
    return clip_grad_norm(model, 1.0).item()


def test_freezing_does_not_forget_that_gradients_are_not_summed(ranks):
    expected = [norm_after_freezing({}, sync=True)] * 2
    found = ranks(norm_after_freezing, 2, dict(dp=2), sync=True)
    assert found == pytest.approx(expected, rel=1e-5)
    with pytest.raises(RankError, match=FORGOTTEN):
        ranks(norm_after_freezing, 2, dict(dp=2), sync=False)


def test_a_loop_keeps_its_model():
    """Nobody else does."""
    ids, _ = make_batch(0)
    losses = []
    for output in megazoo.from_config(tiny_config(), seed=3).microbatches(ids, labels=ids):
        output.loss.backward()
        losses.append(output.loss.item())
    assert len(losses) == 1


def test_a_deep_copy_has_its_own_engine_and_a_shallow_one_shares_it():
    model = megazoo.from_config(tiny_config(), seed=3)
    ids, _ = make_batch(0)
    model.train_batch(ids, labels=ids)
    assert copy.copy(model).engine is model.engine
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.engine.model is other
        assert other.engine.calls == 1
        assert torch.equal(other.train_batch(ids, labels=ids), model.train_batch(ids, labels=ids))
        model.engine.calls = 1
