"""Ranks that do not agree on a call, its rows, its settings or their weights end with one line that
names them and what differs."""

import re
import tempfile
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import megazoo
from megazoo.errors import UserError
from megazoo.evaluation.classifying import classify
from megazoo.evaluation.scoring import score
from megazoo.parallel import agreement, failure
from megazoo.testing import GROUP_TIMEOUT
from megazoo.torch_internals import default_store
from tests.support.layouts import in_layout
from tests.support.sampling import marked_slow
from tests.support.training import context, make_batch, replica_rows, tiny_config

CONFIG = tiny_config(layers=2)


def batch(ctx):
    return replica_rows(make_batch(0)[0], ctx)


def own_rows(model, ctx, is_odd):
    ids = batch(ctx)
    model.train_batch(ids.roll(1, 0) if is_odd else ids, labels=ids)


def shorter_rows(model, ctx, is_odd):
    ids = batch(ctx)[:, : 12 if is_odd else None]
    model.train_batch(ids, labels=ids)


def own_labels(model, ctx, is_odd):
    ids = batch(ctx)
    model(ids, labels=ids.roll(1, 0) if is_odd else ids)


def other_call(model, ctx, is_odd):
    ids = batch(ctx)
    (model.eval_batch if is_odd else model.train_batch)(ids, labels=ids)


def other_count(model, ctx, is_odd):
    ids = batch(ctx)
    model.train_batch(ids, labels=ids, num_microbatches=4 if is_odd else 2)


def other_count_in_a_loop(model, ctx, is_odd):
    ids = batch(ctx)
    for out in model.microbatches(ids, labels=ids, num_microbatches=4 if is_odd else 2):
        out.loss.backward()


def other_schedule(model, ctx, is_odd):
    ids = batch(ctx)
    model.train_batch(ids, labels=ids, num_microbatches=2, schedule="gpipe" if is_odd else "1f1b")


def other_seed(model, ctx, is_odd):
    model = megazoo.from_config(CONFIG, ctx, seed=4 if is_odd else 3)
    model.train_batch(batch(ctx), labels=batch(ctx))


def other_model(model, ctx, is_odd):
    model = megazoo.from_config(tiny_config(layers=2, heads=2 if is_odd else 4), ctx, seed=3)
    model.eval_batch(batch(ctx), labels=batch(ctx))


def other_mode(model, ctx, is_odd):
    model.train(not is_odd)
    model.train_batch(batch(ctx), labels=batch(ctx))


def own_loop(model, ctx, is_odd):
    ids = batch(ctx)
    for out in model.microbatches(ids.roll(1, 0) if is_odd else ids, labels=ids):
        out.loss.backward()


def other_prompts(model, ctx, is_odd):
    model.generate(torch.full((1, 3), 5 + is_odd), max_new_tokens=2)


def other_length(model, ctx, is_odd):
    model.generate(torch.full((1, 3), 5), max_new_tokens=2 + is_odd)


def other_targets(model, ctx, is_odd):
    ids = batch(ctx)
    score(model, ids, ids + is_odd)


def some_mask(model, ctx, is_odd):
    ids = batch(ctx)
    model(ids, torch.ones_like(ids) if is_odd else None, labels=ids)


def stepped(model, ctx, change=lambda model, opt: None):
    opt = megazoo.optim.AdamW(model, lr=1e-3)
    for _ in range(2):
        model.train_batch(batch(ctx), labels=batch(ctx))
        opt.step()
        change(model, opt)


def other_rate(model, ctx, is_odd):
    def change(_, opt):
        opt.lr = 1e-3 * (1 + is_odd)

    stepped(model, ctx, change)


def edited(model, ctx, is_odd):
    def change(model, _):
        with torch.no_grad():
            next(iter(model.layers.values())).mlp.up.weight[0, 0] += is_odd * 1e-3

    stepped(model, ctx, change)


def edited_unseen(model, ctx, is_odd):
    """An edit before a step that is not compared, as most are on CUDA."""
    opt = megazoo.optim.AdamW(model, lr=1e-3)
    for step in range(3):
        with mock.patch.object(failure, "is_compared", return_value=step != 1):
            model.train_batch(batch(ctx), labels=batch(ctx))
            opt.step()
        if step == 0:
            with torch.no_grad():
                next(iter(model.layers.values())).mlp.up.weight[0, 0] += is_odd * 1e-3


def drawn_otherwise(model, ctx, is_odd):
    """The weights of two seeds under one."""
    model = megazoo.from_config(CONFIG, ctx, seed=4 if is_odd else 3)
    model.seed = 3
    stepped(model, ctx)


def other_seed_of_adapters(model, ctx, is_odd):
    megazoo.lora.add(model, seed=5 + is_odd)


def saved_alone(model, ctx, is_odd):
    """The usual `if rank == 0` of one process."""
    if is_odd:
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
    model.train_batch(batch(ctx), labels=batch(ctx))


def counted_alone(model, ctx, is_odd):
    if is_odd:
        model.num_parameters(only_trainable=True)
    model.train_batch(batch(ctx), labels=batch(ctx))


# what differs, over which axes it must not, and what the message says
CASES = [
    (own_rows, ("tp", "cp"), "input_ids is one tensor on .*, another of the same shape on"),
    (shorter_rows, ("tp", "cp"), r"input_ids is of the shape \(8, 16\) on .* \(8, 12\) on"),
    (own_labels, ("tp", "cp"), "disagree in forward: labels is one tensor on"),
    (other_call, ("tp", "cp", "dp", "pp"), "call is 'train_batch' on .*, 'eval_batch' on"),
    (other_count, ("tp", "cp", "pp"), "num_microbatches is 2 on .*, 4 on"),
    (other_count_in_a_loop, ("tp", "cp", "dp", "pp"), "micro-batches is 2 on .*, 4 on"),
    (other_schedule, ("tp", "cp", "dp", "pp"), "schedule is '1f1b' on .*, 'gpipe' on"),
    (other_seed, ("tp", "cp", "dp", "pp"), "the model's seed is 3 on .*, 4 on"),
    (other_model, ("tp", "cp", "dp", "pp"), "the model's heads is 4 on .*, 2 on"),
    (other_mode, ("tp", "cp", "dp", "pp"), "the model's training mode is True on .*, False on"),
    (other_seed_of_adapters, ("tp", "cp", "dp", "pp"), "in lora.add: seed is 5 on .*, 6 on"),
    (saved_alone, ("tp", "cp", "dp", "pp"), "call is 'train_batch' on .*, 'save_pretrained' on"),
    (counted_alone, ("tp", "cp", "dp", "pp"), "call is 'train_batch' on .*, '_frozen_names' on"),
    (own_loop, ("tp", "cp"), "disagree in microbatches: input_ids is one tensor"),
    (other_prompts, ("tp", "cp"), "disagree in generate: input_ids is one tensor"),
    (other_length, ("tp", "cp", "dp", "pp"), "max_new_tokens is 2 on .*, 3 on"),
    (other_targets, ("tp", "cp"), "disagree in score: targets is one tensor"),
    (some_mask, ("tp", "cp"), "attention_mask is None on .*, a tensor on"),
    (other_rate, ("tp", "cp", "dp", "pp"), r"lr of group 0 is 0.001 on .*, 0.002 on"),
    (edited, ("cp", "dp"), r"what was written into layers.0.mlp.up.weight is one tensor"),
    (drawn_otherwise, ("cp", "dp"), "what was written into .* is one tensor"),
    (edited_unseen, ("cp", "dp"), r"what was written into layers.0.mlp.up.weight is one tensor"),
]


def refused(what, axis, layout):
    """What the call says on this rank: where it would wait for its timeout, something else."""
    ctx = context(**layout)
    model = megazoo.from_config(CONFIG, ctx, seed=3)
    with mock.patch.object(failure, "PATIENCE", 0.3):
        try:
            what(model, ctx, ctx.axis(axis).rank % 2 == 1)
        except UserError as error:
            return str(error)
    return "nothing is refused"


@pytest.mark.parametrize(
    ("what", "axis", "message"),
    marked_slow(
        [(what, axis, message) for what, axes, message in CASES for axis in axes],
        lambda number, case: case[1] == "cp" or (number % 3 and case[1] != "tp"),
        name=lambda case: f"{case[0].__name__}-{case[1]}",
    ),
)
def test_ranks_that_disagree_are_named(ranks, what, axis, message):
    for text in in_layout(ranks, refused, f"{axis}2", what, axis):
        assert f"on rank 0 ({axis} 0)" in text
        assert f"on rank 1 ({axis} 1)" in text
        assert re.search(message, text), text


def results(layout, *, own):
    """What this replica gets of rows of its own, or of all replicas' rows."""
    ctx = context(**layout)
    model, rows = megazoo.from_config(CONFIG, ctx, seed=3), make_batch(0)[0]
    classifier = megazoo.from_config(tiny_config(layers=2, num_labels=3, pad_token_id=0), ctx)
    # replicas have unequally many rows, of unequal lengths
    ids = (rows[:3, :5], rows[3:, :9])[ctx.dp_rank] if own else rows[:3, :5]
    return (
        model.generate(ids, max_new_tokens=3),
        *score(model, ids, ids.roll(-1, 1))[:2],
        classify(classifier, ids),
    )


@pytest.mark.parametrize(
    "layout",
    marked_slow(
        ["dp2", "tp2dp2", "cp2dp2", "pp2dp2"], lambda _, layout: layout in ("tp2dp2", "pp2dp2")
    ),
)
def test_a_replica_with_rows_of_its_own_gets_their_results(ranks, layout):
    rows = make_batch(0)[0]
    model = megazoo.from_config(CONFIG, seed=3)
    classifier = megazoo.from_config(tiny_config(layers=2, num_labels=3, pad_token_id=0))
    for own in (True, False):
        for rank, found in enumerate(in_layout(ranks, results, layout, own=own)):
            second = own and (rank // (2 if "cp" in layout or "tp" in layout else 1)) % 2
            ids = rows[3:, :9] if second else rows[:3, :5]
            generated, likely, tokens, logits = found
            assert torch.equal(generated, model.generate(ids, max_new_tokens=3))
            expected = score(model, ids, ids.roll(-1, 1))
            torch.testing.assert_close(likely, expected.log_likelihood, rtol=1e-5, atol=1e-5)
            assert torch.equal(tokens, expected.tokens)
            torch.testing.assert_close(logits, classify(classifier, ids), rtol=1e-5, atol=1e-5)


def called_alone(name, layout):
    """One rank makes a call, and the others none."""
    dist.barrier()  # the ranks come together: the timeout is short
    ctx = megazoo.ParallelContext.from_torch(
        layout["tp"], layout["pp"], device="cpu", timeout=timedelta(seconds=2)
    )
    model, ids = megazoo.from_config(CONFIG, ctx, seed=3), batch(ctx)
    if ctx.rank:
        default_store().wait(["told"], GROUP_TIMEOUT)
        dist.destroy_process_group()
        return None
    try:
        with mock.patch.object(failure, "PATIENCE", 0.3):
            getattr(model, name)(ids, labels=ids)
    except UserError as error:
        return str(error)
    finally:
        default_store().set("told", "")
        dist.destroy_process_group()  # it is no longer fit for the barrier at the end
    return "nothing is refused"


@pytest.mark.parametrize(("layout", "name"), [("tp2", "forward"), ("pp2", "train_batch")])
def test_a_rank_that_calls_alone_ends_with_the_names_of_the_others(ranks, layout, name):
    told, _ = in_layout(ranks, called_alone, layout, name)
    assert told == (
        f"rank 1 did not call {name}, for which the other ranks waited 2 s: all ranks must make "
        "the same calls, in the same order"
    )


def made_alike(layout):
    """Calls that only look different on the ranks."""
    ctx = context(**layout)
    model, ids, is_odd = megazoo.from_config(CONFIG, ctx, seed=3), batch(ctx), ctx.rank % 2
    if is_odd:
        model.train_batch(ids, labels=ids, num_microbatches=2, step=None, loss_fn=None)
        model.eval_batch(ids, labels=ids, return_count=True)
        model.generate(ids[:1, :3], temperature=0.5, max_new_tokens=2, top_k=0, streamer=Streamer())
        return True
    model.train_batch(ids, ids, schedule="1f1b", num_microbatches=2)
    model.eval_batch(ids, ids)
    model.generate(ids[:1, :3], None, max_new_tokens=2, temperature=np.float64(0.5), top_k=0)
    return True


class Streamer:
    def put(self, tokens):
        pass

    def end(self):
        pass


@pytest.mark.parametrize("layout", marked_slow(["tp2", "pp2"], lambda number, _: number))
def test_what_is_given_otherwise_but_means_the_same_is_taken(ranks, layout):
    assert all(in_layout(ranks, made_alike, layout))


def other_work(layout):
    """The loss of a batch that replicas divide into as many micro-batches as they like."""
    ctx = context(**layout)
    model, ids = megazoo.from_config(CONFIG, ctx, seed=3), batch(ctx)
    loss = model.train_batch(ids, labels=ids, num_microbatches=(4, 2)[ctx.dp_rank])
    norm = megazoo.optim.AdamW(model).step()
    return (
        loss.item(),
        norm.item(),
        model.eval_batch(ids, labels=ids, num_microbatches=1 + ctx.dp_rank).item(),
    )


def test_replicas_divide_their_rows_as_they_like(ranks):
    ids = make_batch(0)[0]
    model = megazoo.from_config(CONFIG, seed=3)
    loss = model.train_batch(ids, labels=ids).item()
    norm = megazoo.optim.AdamW(model).step().item()
    expected = loss, norm, model.eval_batch(ids, labels=ids).item()
    for found in in_layout(ranks, other_work, "dp2"):
        assert found == pytest.approx(expected, rel=1e-5)


def stages_with_rows_of_their_own(layout):
    ctx = context(**layout)
    model = megazoo.from_config(CONFIG, ctx, seed=3)
    try:
        model.generate(torch.full((1, 3), 5 + ctx.pp_rank), max_new_tokens=2)
    except UserError as error:
        return str(error)
    return "nothing is refused"


def test_stages_with_rows_of_their_own_are_refused(ranks):
    for text in in_layout(ranks, stages_with_rows_of_their_own, "pp2"):
        assert "the stages of a pipeline were given different rows" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_the_checksum_of_a_device_changes_with_bits_and_their_order(dtype):
    values = (torch.arange(5000) % 2).to(dtype)
    number = agreement._weighted_sum(values)
    with mock.patch.object(agreement, "PIECE_ELEMENTS", 512):
        assert agreement._weighted_sum(values) == number
    changed = values.clone()
    changed[4321] = 1 - changed[4321].int()
    assert agreement._weighted_sum(changed) != number
    assert agreement._weighted_sum(values.roll(1)) != number
