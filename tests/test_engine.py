"""The pipeline engine against one process and against torch.distributed.pipelining: equal gradients, bit for bit."""

import pytest
import torch
from helpers import context, make_batch, randomize, replica_rows, tiny_config

import megazoo
from megazoo.parallel import pipeline
from megazoo.parallel.data_parallel import GradientBuckets
from megazoo.parallel.pipeline import MicroBatch

MICROBATCHES = 4


def gradients(model):
    return {entry.name: entry.parameter.grad.clone() for entry in model.entries()}


def engine_gradients(layout, schedule="1f1b"):
    model = randomize(megazoo.from_config(tiny_config(tied=False), context(**layout), seed=3))
    ids, targets = make_batch(0)
    loss = model.train_batch(ids, targets=targets, num_microbatches=MICROBATCHES, schedule=schedule)
    return loss, gradients(model)


def plain_autograd_gradients():
    """The oracle: one process, torch's own backward, micro-batch by micro-batch."""
    model = randomize(megazoo.from_config(tiny_config(tied=False), seed=3))
    ids, targets = make_batch(0)
    labelled = (targets != -100).sum().float()
    for x, y in zip(ids.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        batch = MicroBatch(tuple(x.shape), x, y)
        (model.loss_sum(model.forward_stage(x, batch, model.stages[0]), batch) / labelled).backward()
    return gradients(model)


def library_gradients(pp):
    """The same stages under torch.distributed.pipelining's 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    ctx = context(pp=pp)
    model = randomize(megazoo.from_config(tiny_config(tied=False), ctx, seed=3))
    ids, targets = make_batch(0)
    labelled = (targets != -100).sum().float()

    class StageModule(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model.forward_stage(x, MicroBatch(tuple(x.shape[:2])), self.model.stages[0])

    def loss(logits, y):
        return model.loss_sum(logits, MicroBatch(tuple(y.shape), None, y)) / labelled

    stage = PipelineStage(StageModule(), ctx.pp_rank, pp, torch.device("cpu"), group=ctx.pp_group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss, scale_grads=False)
    arguments = (ids.contiguous(),) if model.stages[0].first else ()
    schedule.step(*arguments, target=targets if model.stages[0].last else None, return_outputs=False)
    return gradients(model)


def assert_equal_bits(parts, whole):
    assert sorted(name for part in parts for name in part) == sorted(whole)
    for part in parts:
        for name, gradient in part.items():
            assert torch.equal(gradient, whole[name]), name


def test_one_process_equals_plain_autograd():
    assert_equal_bits([engine_gradients({})[1]], plain_autograd_gradients())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("pp", [2, 4])
def test_pipeline_gradients_equal_one_process_bit_for_bit(ranks, pp, schedule):
    results = ranks(engine_gradients, pp, {"pp": pp}, schedule)
    assert_equal_bits([part for _, part in results], plain_autograd_gradients())
    assert len({loss.item() for loss, _ in results}) == 1


@pytest.mark.parametrize("pp", [2, 4])
def test_pipeline_gradients_equal_torch_pipelining_bit_for_bit(ranks, pp):
    ours = [part for _, part in ranks(engine_gradients, pp, {"pp": pp})]
    library = ranks(library_gradients, pp, pp)
    for mine, theirs in zip(ours, library, strict=True):
        assert_equal_bits([mine], theirs)


def outputs_alive(microbatches):
    """The most bytes that outputs awaiting their backward held on this rank at any time."""
    model = megazoo.from_config(tiny_config(), context(pp=2), seed=3)
    most, exchange = 0, pipeline._Run.exchange

    def watched(run, item):
        nonlocal most
        exchange(run, item)
        most = max(most, sum(output.untyped_storage().nbytes() for _, output in run.graphs.values()))

    pipeline._Run.exchange = watched
    try:
        ids, targets = make_batch(0, batch=microbatches)
        model.train_batch(ids, targets=targets, num_microbatches=microbatches, schedule="gpipe")
    finally:
        pipeline._Run.exchange = exchange
    return most


def test_sent_outputs_give_their_memory_back(ranks):
    one_output = 16 * 32 * 4
    assert ranks(outputs_alive, 2, 16)[0] < one_output, "sixteen outputs were sent, none should hold its values"


def reduced_in_small_buckets():
    """Train a batch with many buckets; returns how many had left before the end, of how many, and the gradients."""
    ctx = context(dp=2)
    model = randomize(megazoo.from_config(tiny_config(), ctx, seed=3))
    model._buckets = GradientBuckets([entry.parameter for entry in model.entries()], ctx, bucket_elements=2000)
    left, finish = [], model._buckets.finish
    model._buckets.finish = lambda scale: left.append(model._buckets.launched) or finish(scale)
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    model.train_batch(ids, targets=targets, num_microbatches=2)
    return left[0], len(model._buckets.buckets), gradients(model)


def test_buckets_leave_while_the_last_backward_runs(ranks):
    ids, targets = make_batch(0)
    whole = randomize(megazoo.from_config(tiny_config(), seed=3))
    whole.train_batch(ids, targets=targets)
    for left, buckets, parts in ranks(reduced_in_small_buckets, 2):
        assert left == buckets > 10
        for entry in whole.entries():
            torch.testing.assert_close(parts[entry.name], entry.parameter.grad, atol=1e-7, rtol=1e-4)


def forward_in_layout(layout, with_labels):
    model = randomize(megazoo.from_config(tiny_config(), context(**layout), seed=3)).eval()
    ids, _ = make_batch(0)
    with torch.no_grad():
        output = model(ids, labels=ids if with_labels else None, return_logits=True)
    return output.loss, output.logits, model.stages[-1].last


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"tp": 4}], ids=str)
@pytest.mark.parametrize("with_labels", [True, False])
def test_forward_gives_loss_everywhere_and_logits_on_the_last_stage(ranks, layout, with_labels):
    loss, logits, _ = forward_in_layout({}, with_labels)
    size = layout.get("tp", 1) * layout.get("pp", 1)
    for rank_loss, rank_logits, last in ranks(forward_in_layout, size, layout, with_labels):
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
