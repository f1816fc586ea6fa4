"""The pipeline engine against one process and against torch.distributed.pipelining: equal
gradients, bit for bit."""

from dataclasses import replace
from functools import cache
from itertools import product
from unittest import mock

import pytest
import torch

import megazoo
from megazoo.engine.microbatch import MicroBatch
from megazoo.engine.stage import StageRun
from megazoo.engine.transport import RankTransport
from megazoo.errors import UserError
from megazoo.layers import PositionEmbedding, segment_mask
from megazoo.models.gpt2 import GPT2
from megazoo.parallel.buckets import GradientBuckets
from megazoo.parallel.cpu import shared_memory
from megazoo.parallel.deferred import WeightQueue
from megazoo.parallel.schedule import Action
from tests.support.layouts import in_layout
from tests.support.sampling import marked_slow
from tests.support.training import (
    MODELS,
    context,
    layout_name,
    make_batch,
    randomize,
    replica_rows,
    tiny_config,
    worst_relative,
)

MICROBATCHES = 4


def gradients(model):
    return {entry.name: entry.parameter.grad.clone() for entry in model.entries()}


# Eight layers, for as many stages.
UNTIED = {
    "gpt2": tiny_config(tied=False, layers=8),
    "llama": replace(MODELS["llama"], layers=8, tie_embeddings=False),
}


def engine_gradients(
    layout, schedule="1f1b", model="gpt2", microbatches=MICROBATCHES, recompute="none"
):
    model = randomize(megazoo.from_config(UNTIED[model], context(**layout), seed=3)).recompute(
        recompute
    )
    ids, targets = make_batch(0, 2 * microbatches)
    loss = model.train_batch(ids, targets=targets, num_microbatches=microbatches, schedule=schedule)
    return loss, gradients(model)


@cache
def plain_autograd_gradients(model="gpt2", microbatches=MICROBATCHES):
    """The oracle: one process, torch's own backward, micro-batch by micro-batch."""
    model = randomize(megazoo.from_config(UNTIED[model], seed=3))
    ids, targets = make_batch(0, 2 * microbatches)
    labelled = (targets != -100).sum().float()
    for x, y in zip(ids.chunk(microbatches), targets.chunk(microbatches), strict=True):
        batch = MicroBatch(tuple(x.shape), x, y)
        logits = model.output_head.outputs(model.forward_stage(x, batch, model.stages[0]), batch)
        (model.output_head.loss_sum(logits, batch) / labelled).backward()
    return gradients(model)


def library_gradients(layout, microbatches):
    """The same stages under torch.distributed.pipelining's 1F1B, interleaved if a rank has
    several."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    ctx = context(**layout)
    model = randomize(megazoo.from_config(UNTIED["gpt2"], ctx, seed=3))
    ids, targets = make_batch(0, 2 * microbatches)
    labelled = (targets != -100).sum().float()

    class StageModule(torch.nn.Module):
        def __init__(self, stage):
            super().__init__()
            self.model, self.stage = model, stage

        def forward(self, x):
            return self.model.forward_stage(x, MicroBatch(tuple(x.shape[:2])), self.stage)

    def loss(x, y):
        batch = MicroBatch(tuple(y.shape), None, y)
        return model.output_head.loss(x, batch) / labelled

    stages = [
        PipelineStage(
            StageModule(stage), stage.index, stage.count, torch.device("cpu"), group=ctx.pp_group
        )
        for stage in model.stages
    ]
    how = {"loss_fn": loss, "scale_grads": False}
    if len(stages) > 1:
        schedule = ScheduleInterleaved1F1B(stages, microbatches, **how)
    else:
        schedule = Schedule1F1B(stages[0], microbatches, **how)
    arguments = (ids.contiguous(),) if model.stages[0].first else ()
    schedule.step(
        *arguments, target=targets if model.stages[-1].last else None, return_outputs=False
    )
    return gradients(model)


def assert_equal_bits(parts, whole):
    assert sorted(name for part in parts for name in part) == sorted(whole)
    for part in parts:
        for name, gradient in part.items():
            assert torch.equal(gradient, whole[name]), name


def test_one_process_equals_plain_autograd():
    assert_equal_bits([engine_gradients({})[1]], plain_autograd_gradients())


PIPELINES = [
    ("1f1b", dict(pp=2)),
    ("1f1b", dict(pp=4)),
    ("gpipe", dict(pp=2)),
    ("gpipe", dict(pp=4)),
    ("zb-h1", dict(pp=2)),
    ("zb-h1", dict(pp=4)),
    ("1f1b", dict(pp=2, v=2)),
    ("1f1b", dict(pp=2, v=3)),
    ("1f1b", dict(pp=4, v=2)),
    ("gpipe", dict(pp=2, v=2)),
]
BITS = [
    (*pipeline, *more)
    for pipeline in PIPELINES
    for more in product(UNTIED, (1, 4, 5, 6), ("none", "full"))
]


FAST = [  # whole and split backwards, one stage a rank and several, with and without recomputation
    BITS[place + 16 * number] for number, place in {0: 0, 4: 5, 7: 12, 8: 3, 9: 10}.items()
]


@pytest.mark.parametrize(
    ("schedule", "layout", "model", "microbatches", "recompute"),
    marked_slow(BITS, lambda _, case: case not in FAST, name=lambda case: " ".join(map(str, case))),
)
def test_pipeline_gradients_equal_one_process_bit_for_bit(
    ranks, schedule, layout, model, microbatches, recompute
):
    """Interleaved and with waiting weights, too, for numbers of micro-batches that pp does not
    divide."""
    results = ranks(
        engine_gradients, layout["pp"], layout, schedule, model, microbatches, recompute
    )
    assert_equal_bits([part for _, part in results], plain_autograd_gradients(model, microbatches))
    assert len({loss.item() for loss, _ in results}) == 1


def gradients_by_gloo(*args):
    with mock.patch.object(shared_memory, "shared_by", return_value=None):
        return engine_gradients(*args)


@pytest.mark.parametrize(
    ("schedule", "layout"), marked_slow(PIPELINES, lambda number, _: number not in (4, 6))
)
def test_pipelines_without_shared_memory_give_the_same_bits(ranks, schedule, layout):
    results = ranks(gradients_by_gloo, layout["pp"], layout, schedule, "llama", 5)
    assert_equal_bits([part for _, part in results], plain_autograd_gradients("llama", 5))


@pytest.mark.parametrize(
    "layout",
    marked_slow(
        [dict(pp=2, v=2), dict(pp=2), dict(pp=4), dict(pp=4, v=2)],
        lambda number, _: number > 0,
        name=layout_name,
    ),
)
def test_pipeline_gradients_equal_torch_pipelining_bit_for_bit(ranks, layout):
    ours = [part for _, part in ranks(engine_gradients, layout["pp"], layout)]
    library = ranks(library_gradients, layout["pp"], layout, MICROBATCHES)
    for mine, theirs in zip(ours, library, strict=True):
        assert_equal_bits([mine], theirs)


def waiting_weights(schedule):
    """How many weight gradients waited in a batch, and how many linear weights there are."""
    put, count = WeightQueue.put, []
    model = megazoo.from_config(UNTIED["llama"], context(pp=2), seed=3)
    ids, targets = make_batch(0)
    with mock.patch.object(
        WeightQueue, "put", lambda queue, *what: count.append(1) or put(queue, *what)
    ):
        model.train_batch(ids, targets=targets, num_microbatches=MICROBATCHES, schedule=schedule)
    matrices = sum(parameter.dim() > 1 for parameter in model.parameters())
    return len(count), matrices - model.stages[0].first  # without the embedding


def test_the_weights_of_all_linear_layers_wait_under_zb_h1_and_only_there(ranks):
    assert [count for count, _ in ranks(waiting_weights, 2, "1f1b")] == [0, 0]
    for count, weights in ranks(waiting_weights, 2, "zb-h1"):
        assert count == weights * MICROBATCHES


class TiedInThree(GPT2):
    """A GPT-2 that adds one more table of positions at the start of several stages: one
    parameter."""

    def __init__(self, config, ctx, seed=0):
        super().__init__(config, ctx, seed)
        if any(stage.index in (0, 1, 3) for stage in self.stages):
            self.extra = PositionEmbedding(config.max_positions, config.hidden_size)
        self.tie("extra.weight", *(stage for stage in (0, 1, 3) if stage < ctx.stage_count))

    def forward_stage(self, x, batch, stage):
        if stage.index in (0, 1, 3) and not stage.first:
            x = x + self.extra(batch.positions(x.device))
        if self.ctx.stage_count == 1:  # what four stages do, in one
            mask = segment_mask(batch.segments, batch.shape[1])
            x = self.embedding(x) + self.position_embedding(batch.positions(x.device))
            for i, layer in enumerate(self.layers.values()):
                x = x + self.extra(batch.positions(x.device)) if i in (2, 6) else x
                x = layer(x, batch, mask)
            return self.norm(x)
        return super().forward_stage(x, batch, stage)


def train_tied(layout):
    ctx = context(**layout, stage_layers=(2, 2, 2, 2) if layout else "balanced")
    model = TiedInThree.build(tiny_config(tied=True, layers=8), ctx, seed=3)
    optimizer, losses = megazoo.optim.AdamW(model, lr=1e-2), []
    for step in range(3):
        ids, targets = make_batch(step)
        loss = model.train_batch(ids, targets=targets, num_microbatches=4, step=step)
        losses.append((loss.item(), optimizer.step().item()))
    return losses, model.extra.weight.detach().clone() if hasattr(model, "extra") else None


@pytest.mark.parametrize(
    "layout",
    marked_slow([dict(pp=2, v=2), dict(pp=4)], lambda number, _: number > 0, name=layout_name),
)
def test_any_parameter_may_be_tied_between_any_stages(ranks, layout):
    losses, weight = train_tied({})
    for ours, tied in ranks(train_tied, layout["pp"], layout):
        assert worst_relative(ours, losses) < 1e-5
        assert tied is None or torch.allclose(tied, weight, atol=1e-6)


class HalfAsPrecise(GPT2):
    def forward_stage(self, x, batch, stage):
        return super().forward_stage(x, batch, stage).bfloat16()


def refused():
    """What the first stage is told; the second would wait."""
    model = HalfAsPrecise.build(tiny_config(), context(pp=2), seed=3)
    if not model.stages[0].first:
        return None
    ids, targets = make_batch(0)
    batches = [MicroBatch(tuple(ids.shape), ids, targets)]
    run = StageRun(model, batches, torch.ones(()), RankTransport(model, batches))
    with pytest.raises(UserError) as told:
        run.forward(Action("F", 0, 0), train=True)
    return str(told.value)


def test_what_a_stage_returns_must_be_what_the_next_one_expects(ranks):
    told = (
        "forward_stage of stage 0 returns torch.bfloat16 [8, 16, 32]: "
        "it must return torch.float32 [8, 16, 32]"
    )
    assert ranks(refused, 2)[0] == told


def outputs_alive(microbatches):
    """The most bytes that outputs awaiting their backward held on this rank at any time."""
    model = megazoo.from_config(tiny_config(), context(pp=2), seed=3)
    most, forward = 0, StageRun.forward

    def watched(run, action, train):
        nonlocal most
        forward(run, action, train)
        most = max(
            most, sum(output.untyped_storage().nbytes() for _, output in run.graphs.values())
        )

    StageRun.forward = watched
    try:
        ids, targets = make_batch(0, batch=microbatches)
        model.train_batch(ids, targets=targets, num_microbatches=microbatches, schedule="gpipe")
    finally:
        StageRun.forward = forward
    return most


def test_sent_outputs_give_their_memory_back(ranks):
    one_output = 16 * 32 * 4
    assert ranks(outputs_alive, 2, 16)[0] < one_output, (
        "sixteen outputs were sent, none should hold its values"
    )


def reduced_in_small_buckets():
    """Train a batch with many buckets; returns how many had left before the end, of how many, and
    the gradients."""
    ctx = context(dp=2)
    model = randomize(megazoo.from_config(tiny_config(), ctx, seed=3))
    model.engine.gradients.made = GradientBuckets(
        [entry.parameter for entry in model.entries()], ctx, bucket_elements=2000
    )
    left, finish = [], model.engine.gradients.buckets.wait_for_sums
    model.engine.gradients.buckets.wait_for_sums = lambda scale: (
        left.append(model.engine.gradients.buckets.launched) or finish(scale)
    )
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    model.train_batch(ids, targets=targets, num_microbatches=2)
    return left[0], len(model.engine.gradients.buckets.members), gradients(model)


def test_buckets_leave_while_the_last_backward_runs(ranks):
    ids, targets = make_batch(0)
    whole = randomize(megazoo.from_config(tiny_config(), seed=3))
    whole.train_batch(ids, targets=targets)
    for left, buckets, parts in ranks(reduced_in_small_buckets, 2):
        assert left == buckets > 10
        for entry in whole.entries():
            torch.testing.assert_close(
                parts[entry.name], entry.parameter.grad, atol=1e-7, rtol=1e-4
            )


def forward_in_layout(with_labels, layout):
    model = randomize(megazoo.from_config(tiny_config(), context(**layout), seed=3)).eval()
    ids, _ = make_batch(0)
    with torch.no_grad():
        output = model(ids, labels=ids if with_labels else None, return_logits=True)
    return output.loss, output.logits, model.stages[-1].last


@pytest.mark.parametrize(
    "layout", marked_slow(["tp2pp2", "tp4", "tp2", "pp2"], lambda number, _: number > 0)
)
def test_forward_gives_loss_everywhere_and_logits_on_the_last_stage(ranks, layout):
    for with_labels in (True, False):
        loss, logits, _ = forward_in_layout(with_labels, {})
        for rank_loss, rank_logits, last in in_layout(
            ranks, forward_in_layout, layout, with_labels
        ):
            assert (rank_loss is None) == (not with_labels)
            assert rank_loss is None or abs(rank_loss - loss) < 1e-5
            assert (rank_logits is not None) == last
            if last:
                assert rank_logits.shape == (8, 16, 61)
                torch.testing.assert_close(rank_logits, logits, atol=1e-5, rtol=0)


def test_loss_can_be_differentiated_without_a_pipeline():
    model = megazoo.from_config(tiny_config(), seed=3)
    ids, _ = make_batch(0)
    model(ids, labels=ids).loss.backward()
    by_hand = {entry.name: entry.parameter.grad.clone() for entry in model.entries()}
    model.train_batch(ids, labels=ids)
    for entry in model.entries():
        torch.testing.assert_close(entry.parameter.grad, by_hand[entry.name], atol=1e-7, rtol=1e-5)
