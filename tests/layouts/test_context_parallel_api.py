"""The calls of a model under context parallelism: each gives what one process gives."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megazoo.parallel.sequence import SequenceCut, padded_length
from tests.support.context_parallel import (
    ROWS,
    TOKENS,
    assert_gradients_equal,
    batch_of,
    cp_name,
    model_in,
    parts_of_gradients,
    rows_of_replica,
)
from tests.support.training import MODELS, context, tiny_config, world

GPT2 = tiny_config(layers=2)
LLAMA = replace(MODELS["llama"], layers=2)
CP2, CP3, ULYSSES = dict(cp=2), dict(cp=3), dict(cp=2, method="ulysses")
TP, PP, DP = dict(tp=2, cp=2, sp=True), dict(pp=2, cp=2), dict(dp=2, cp=2)
LABELS_OF_ROWS = torch.tensor([3.0, -1.0, 0.5, 2.0])
WITHOUT_LABELS = torch.full((2, TOKENS), -100)  # the first two rows, a micro-batch or a replica


def loss_of_rows(logits, labels):
    """A mean over rows, in which every token of a row has its own weight."""
    weights = torch.linspace(0.1, 1.0, logits.shape[1])
    return ((logits.logsumexp(-1) * weights).mean(1) - labels).square().mean()


def loss_of_tokens(logits, labels):
    return 1.5 * F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def labels_of(kind: str) -> torch.Tensor:
    labels = batch_of(0)["input_ids"]
    labels = labels.masked_fill(torch.arange(TOKENS) % 3 == 1, -100)
    return torch.cat([WITHOUT_LABELS, labels[2:]]) if "a part without" in kind else labels


def gradients_by(how: str, config, layout: dict):
    """The loss (the micro-batches' added up), and the gradients, by one way to them."""
    ctx = context(**layout)
    model = model_in(config, ctx)
    rows = rows_of_replica(
        batch_of(0, "padding, positions") | {"labels": labels_of(how), "rows": LABELS_OF_ROWS}, ctx
    )
    labels, of_rows, targets = (rows.pop(name) for name in ("labels", "rows", "targets"))
    count = 1 if ctx.dp_size > 1 else 2
    if "microbatches" in how:
        losses = []
        for out in model.microbatches(**rows, targets=targets, num_microbatches=count):
            out.loss.backward()
            losses.append(out.loss.detach())
        loss = sum(losses)
    elif "loss of tokens" in how:
        loss = model.train_batch(
            **rows, labels=labels, loss_fn=loss_of_tokens, num_microbatches=count
        )
    elif "loss of rows" in how:
        loss = model.train_batch(
            **rows, labels=of_rows, loss_fn=loss_of_rows, num_microbatches=count
        )
    elif "backward" in how:
        # each replica's mean is differentiated, then their mean taken
        loss = model(**rows, labels=labels).loss
        loss.backward()
        model.sync_gradients()
    else:
        logits = model(**rows).logits
        loss = loss_of_rows(logits, of_rows)
        loss.backward()
        model.sync_gradients()
    return loss.item(), parts_of_gradients(model)


WAYS = [
    ("microbatches", (CP3, ULYSSES, TP, PP, DP)),
    ("loss of tokens", (CP2, TP, PP, DP)),
    ("loss of tokens, a part without", (CP3, PP, DP)),
    ("loss of rows", (CP2, ULYSSES, TP, PP, DP)),
    ("backward", (CP3, ULYSSES, TP)),
    ("logits", (CP3, ULYSSES, TP)),
]


@pytest.mark.parametrize(
    ("how", "layout"), [(how, layout) for how, layouts in WAYS for layout in layouts], ids=cp_name
)
def test_every_way_to_the_gradients_gives_those_of_one_process(ranks, how, layout):
    loss, gradients = gradients_by(how, LLAMA, {})
    results = ranks(gradients_by, world(layout), how, LLAMA, layout)
    for ours, _ in results:
        assert ours == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal([parts for _, parts in results], gradients)


@pytest.mark.parametrize("how", ["backward", "logits"])
def test_a_backward_of_ones_own_is_averaged_over_the_replicas(ranks, how):
    """As DistributedDataParallel has it: over dp alone, not over cp."""
    expected = ranks(gradients_by, 2, how, LLAMA, dict(dp=2))
    results = ranks(gradients_by, 4, how, LLAMA, DP)
    for rank, (loss, _) in enumerate(results):
        assert loss == pytest.approx(expected[rank // 2][0], rel=1e-5)
    assert_gradients_equal([parts for _, parts in results], expected[0][1])


def outputs_in(config, kind: str, layout: dict):
    """Logits and loss of a forward, and the loss and the count of an evaluation."""
    ctx = context(**layout)
    model = model_in(config, ctx)
    batch = rows_of_replica(batch_of(1, kind), ctx)
    targets = batch.pop("targets")
    labels = labels_of(kind).chunk(ctx.dp_size)[ctx.dp_rank]
    out = model(**batch, labels=labels, return_logits=True)
    loss, count = model.eval_batch(**batch, targets=targets, return_count=True)
    logits = None if out.logits is None else out.logits.detach()
    return model.has_last, logits, out.loss.item(), loss.item(), count.item()


@pytest.mark.parametrize(
    "kind", ["plain", "padding", "documents", "padding, positions", "documents, a part without"]
)
@pytest.mark.parametrize("layout", [CP3, ULYSSES, TP, PP], ids=cp_name)
def test_logits_are_whole_and_in_order_and_losses_and_counts_right(ranks, kind, layout):
    _, logits, *numbers = outputs_in(GPT2, kind, {})
    results = ranks(outputs_in, world(layout), GPT2, kind, layout)
    mask = batch_of(1, kind).get("attention_mask", torch.ones(ROWS, TOKENS)).bool()
    for has_last, theirs, *others in results:
        assert others == pytest.approx(numbers, rel=1e-5)
        assert (theirs is not None) == has_last
        if has_last:
            assert theirs.shape == logits.shape
            torch.testing.assert_close(theirs[mask], logits[mask], atol=1e-5, rtol=1e-5)


def uneven_replicas(kind: str, layout: dict):
    """Loss, count and gradients where a replica has no rows, or none of its tokens a label."""
    ctx = context(**layout)
    model, batch = model_in(LLAMA, ctx), batch_of(0, "padding")
    if kind == "no labels":
        batch["targets"][:2] = -100
        batch = rows_of_replica(batch, ctx)
    elif ctx.dp_size > 1:
        batch = {name: x[: 0 if ctx.dp_rank else None] for name, x in batch.items()}
    loss = model.train_batch(**batch)
    gradients = parts_of_gradients(model)
    return (loss.item(), model.eval_batch(**batch, return_count=True)[1].item()), gradients


@pytest.mark.parametrize("method", ["allgather", "ulysses"])
@pytest.mark.parametrize("kind", ["no labels", "no rows"])
def test_a_replica_may_have_nothing_to_do(ranks, kind, method):
    numbers, gradients = uneven_replicas(kind, {})
    results = ranks(uneven_replicas, 4, kind, {**DP, "method": method})
    for ours, _ in results:
        assert ours == pytest.approx(numbers, rel=1e-5)
    assert_gradients_equal([parts for _, parts in results], gradients)


def trained_on_parts(layout: dict, parts: bool):
    """The loss where each rank is given its own chunks alone, what the others have being wrong."""
    ctx = context(**layout)
    model, batch = model_in(LLAMA, ctx), batch_of(0, "documents")
    if parts:
        padded = padded_length(TOKENS, ctx)
        cut = SequenceCut.of(padded, ctx)
        for name in ("input_ids", "targets"):
            batch[name] = cut.own(F.pad(batch[name], (0, padded - TOKENS), value=7))
        batch["sequence_length"] = TOKENS
    loss = model.train_batch(**batch, num_microbatches=2)
    gradients = parts_of_gradients(model)
    return (loss.item(), model.eval_batch(**batch).item()), gradients


@pytest.mark.parametrize("layout", [CP3, ULYSSES, TP, PP], ids=cp_name)
def test_a_rank_may_be_given_its_part_alone(ranks, layout):
    """What is beyond sequence_length doesn't count, whatever stands there."""
    numbers, gradients = trained_on_parts({}, parts=False)
    results = ranks(trained_on_parts, world(layout), layout, True)
    for ours, _ in results:
        assert ours == pytest.approx(numbers, rel=1e-5)
    assert_gradients_equal([parts for _, parts in results], gradients)
